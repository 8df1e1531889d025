"""Files of rows of bytes that are read by index: MNIST's idx files, and CIFAR's binary files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, final

import numpy as np

from raydist.core.errors import InvalidArgumentError
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.element_nests import flatten_element
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.random_access import RandomAccess
from raydist.pipelines.formats.byte_streams import ByteStream, open_stream
from raydist.pipelines.formats.files import data_loss, local_size
from raydist.pipelines.formats.numpy_format import StoredArray
from raydist.pipelines.sources.memory import IndexedSourceOp
from raydist.pipelines.sources.numpy_files import FileAccess

_UNSIGNED_BYTES = 8  # code of the dtype in an idx file
_READ_BYTES = 1 << 20
_SIDE = 32  # of a CIFAR image
_LABEL = TensorSpec((), np.int64)

Array = np.ndarray[Any, Any]


@final
@dataclass(frozen=True)
class CompressedArray:
    """An array of bytes in a file that is compressed by gzip, which is read whole."""

    path: str
    offset: int
    shape: tuple[int, ...]

    def load(self) -> Array:
        """Return the array, read-only. Raises DataLossError if the file is damaged."""
        with closing(open_stream(self.path, "GZIP")) as stream:
            _read(stream, self.path, self.offset)
            data = _read(stream, self.path, math.prod(self.shape))
            if stream.read(1):
                problem = f"The file must end behind {len(data)} bytes of data"
                raise data_loss(self.path, self.offset + len(data), problem)
        return np.frombuffer(data, np.uint8).reshape(self.shape)

    def require_whole(self) -> None:
        """Do nothing: the array does not depend on the file once it is loaded."""


def _read(stream: ByteStream, path: str, size: int) -> bytes:
    """Return the next `size` bytes. Memory follows what the file holds, whatever its header claims."""
    parts: list[bytes] = []
    left = size
    while left and (part := stream.read(min(left, _READ_BYTES))):
        parts.append(part)
        left -= len(part)
    if left:
        problem = f"The file must have {left} more bytes: it is truncated, or its header wrong"
        raise data_loss(path, size - left, problem)
    return b"".join(parts)


def idx_array(path: str) -> StoredArray | CompressedArray:
    """Read the header of an idx file of unsigned bytes, compressed if its name ends in ".gz"."""
    is_compressed = path.endswith(".gz")
    with closing(open_stream(path, "GZIP" if is_compressed else None)) as stream:
        head = _read(stream, path, 4)
        if head[:3] != bytes([0, 0, _UNSIGNED_BYTES]) or head[3] not in (1, 3):
            problem = f"An idx file of images or labels must begin with the bytes 0, 0, 8 and 3 or 1, got {[*head]}"
            raise data_loss(path, 0, problem)
        shape = tuple(np.frombuffer(_read(stream, path, 4 * head[3]), ">u4").tolist())
    offset = 4 + 4 * len(shape)
    if is_compressed:
        return CompressedArray(path, offset, shape)
    size, wanted = local_size(path), offset + math.prod(shape)
    if size != wanted:
        problem = f"A file of an array of shape {shape} must have {wanted} bytes, got {size}"
        raise data_loss(path, min(size, wanted), problem)
    return StoredArray(path, None, shape, np.dtype(np.uint8), False, offset)


def idx_op(images_path: str, labels_path: str) -> RowFilesOp:
    """Return the operation of images, and a label for each, in two idx files."""
    images, labels = idx_array(images_path), idx_array(labels_path)
    if len(images.shape) != 3 or len(labels.shape) != 1:
        raise InvalidArgumentError(
            f"The files must hold images (n, height, width) and labels (n,), got shape {images.shape} in "
            f"{images_path!r} and {labels.shape} in {labels_path!r}. Give the images first."
        )
    if images.shape[0] != labels.shape[0]:
        count = f"each of the {images.shape[0]} images in {images_path!r}"
        raise data_loss(labels_path, 4, f"There must be a label for {count}, got {labels.shape[0]}")
    spec = {"image": TensorSpec((*images.shape[1:], 1), np.uint8), "label": _LABEL}
    return RowFilesOp((images, labels), _idx_examples, spec)


def _idx_examples(images: Array, labels: Array) -> Mapping[str, Array]:
    return {"image": images[..., None], "label": labels.astype(np.int64)}


def cifar_op(path: str, label_keys: tuple[str, ...]) -> RowFilesOp:
    """Return the operation of records of labels, one byte each, and 32 x 32 pixels, channel by channel."""
    record_bytes, size = len(label_keys) + 3 * _SIDE * _SIDE, local_size(path)
    if size % record_bytes or not size:
        problem = f"The file must have records of {record_bytes} bytes, got {size}"
        raise data_loss(path, size - size % record_bytes, problem)
    spec = {"image": TensorSpec((_SIDE, _SIDE, 3), np.uint8), **dict.fromkeys(label_keys, _LABEL)}
    records = StoredArray(path, None, (size // record_bytes, record_bytes), np.dtype(np.uint8), False, 0)
    return RowFilesOp((records,), partial(_cifar_examples, label_keys), spec)


def _cifar_examples(label_keys: tuple[str, ...], records: Array) -> Mapping[str, Array]:
    images = records[:, len(label_keys) :].reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1)
    labels = {key: records[:, number].astype(np.int64) for number, key in enumerate(label_keys)}
    return {"image": np.ascontiguousarray(images), **labels}


@final
@dataclass(frozen=True, eq=False)
class RowFilesOp(IndexedSourceOp):
    """The examples that `examples` makes of the rows of arrays in files."""

    arrays: tuple[StoredArray | CompressedArray, ...]  # of one first dimension
    examples: Callable[..., Mapping[str, Array]]  # returns columns of examples; gets some rows of each array
    spec: Mapping[str, TensorSpec]  # of an example
    gives_rows = True
    name = "load"

    @property
    def label(self) -> str:
        return f"load({', '.join(repr(array.path) for array in self.arrays)})"

    def element_spec(self) -> Any:
        return self.spec

    def random_access(self) -> RandomAccess:
        return self._access

    @cached_property
    def _access(self) -> RandomAccess:
        return _RowAccess(self.arrays, self.examples, self.spec)  # shared by all passes: compressed files are read once


@final
@dataclass(frozen=True, eq=False)
class _RowAccess(FileAccess):
    examples: Callable[..., Mapping[str, Array]]
    spec: Mapping[str, TensorSpec]

    def block(self, rows: Sequence[Array], count: int) -> Block:
        columns, structure = flatten_element(self.examples(*rows))
        specs, _ = flatten_element(self.spec)
        return Block(structure, tuple(specs), tuple(columns), count)
