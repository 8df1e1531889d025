"""Files of rows of bytes that are read by index: MNIST's idx files, and CIFAR's binary files."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, final

import numpy as np

from raydist.core.errors import DataLossError, InvalidArgumentError
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.element_nests import flatten_element
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.random_access import RandomAccess
from raydist.pipelines.formats.byte_streams import ByteStream, open_stream
from raydist.pipelines.formats.files import data_loss, local_size
from raydist.pipelines.formats.numpy_format import StoredArray
from raydist.pipelines.sources.memory import IndexedSourceOp, is_consecutive

_UNSIGNED_BYTES = 8  # code of the dtype in an idx file
_READ_BYTES = 1 << 20
_SIDE = 32  # of a CIFAR image
_LABEL = TensorSpec((), np.int64)

Array = np.ndarray[Any, Any]


@final
@dataclass(frozen=True)
class ByteArray:
    """An array of bytes in a file. The file is mapped into memory, or read whole if it is compressed."""

    path: str
    offset: int
    shape: tuple[int, ...]

    @cached_property
    def mapped(self) -> StoredArray | None:
        """The array of an uncompressed file."""
        if self.path.endswith(".gz"):
            return None
        return StoredArray(self.path, None, self.shape, np.dtype(np.uint8), False, self.offset)

    def load(self) -> Array:
        """Return the array, read-only. Raises DataLossError if the file is damaged."""
        if self.mapped is not None:
            return self.mapped.load()
        with closing(_stream(self.path)) as stream:
            _read(stream, self.path, self.offset)
            data = _read(stream, self.path, math.prod(self.shape))
            if stream.read(1):
                raise data_loss(
                    self.path, self.offset + len(data), f"The file must end behind {len(data)} bytes of data"
                )
        return np.frombuffer(data, np.uint8).reshape(self.shape)


def _stream(path: str) -> ByteStream:
    return open_stream(path, "GZIP" if path.endswith(".gz") else None)


def _read(stream: ByteStream, path: str, size: int) -> bytes:
    """Return the next `size` bytes. Memory follows what the file holds, whatever its header claims."""
    parts: list[bytes] = []
    left = size
    while left and (part := stream.read(min(left, _READ_BYTES))):
        parts.append(part)
        left -= len(part)
    if left:
        raise data_loss(
            path, size - left, f"The file must have {left} more bytes: it is truncated, or its header wrong"
        )
    return b"".join(parts)


def idx_array(path: str) -> ByteArray:
    """Read the header of an idx file of unsigned bytes, compressed if its name ends in ".gz"."""
    with closing(_stream(path)) as stream:
        head = _read(stream, path, 4)
        if head[:3] != bytes([0, 0, _UNSIGNED_BYTES]) or head[3] not in (1, 3):
            problem = f"An idx file of images or labels must begin with the bytes 0, 0, 8 and 3 or 1, got {[*head]}"
            raise data_loss(path, 0, problem)
        shape = tuple(np.frombuffer(_read(stream, path, 4 * head[3]), ">u4").tolist())
    found = ByteArray(path, 4 + 4 * len(shape), shape)
    size, wanted = local_size(path), found.offset + math.prod(shape)
    if found.mapped is not None and size != wanted:
        raise data_loss(
            path, min(size, wanted), f"A file of an array of shape {shape} must have {wanted} bytes, got {size}"
        )
    return found


def idx_op(images_path: str, labels_path: str) -> RowFilesOp:
    """Return the operation of images, and a label for each, in two idx files."""
    images, labels = idx_array(images_path), idx_array(labels_path)
    if len(images.shape) != 3 or len(labels.shape) != 1:
        raise InvalidArgumentError(
            f"The files must hold images (n, height, width) and labels (n,), got shape {images.shape} in "
            f"{images_path!r} and {labels.shape} in {labels_path!r}. Give the images first."
        )
    if images.shape[0] != labels.shape[0]:
        problem = (
            f"There must be a label for each of the {images.shape[0]} images in {images_path!r}, got {labels.shape[0]}"
        )
        raise data_loss(labels_path, 4, problem)
    spec = {"image": TensorSpec((*images.shape[1:], 1), np.uint8), "label": _LABEL}
    return RowFilesOp((images, labels), _idx_examples, spec)


def _idx_examples(images: Array, labels: Array) -> Mapping[str, Array]:
    return {"image": images[..., None], "label": labels.astype(np.int64)}


def cifar_op(path: str, label_keys: tuple[str, ...]) -> RowFilesOp:
    """Return the operation of records of labels, one byte each, and 32 x 32 pixels, channel by channel."""
    record_bytes, size = len(label_keys) + 3 * _SIDE * _SIDE, local_size(path)
    if size % record_bytes or not size:
        raise data_loss(
            path, size - size % record_bytes, f"The file must have records of {record_bytes} bytes, got {size}"
        )
    spec = {"image": TensorSpec((_SIDE, _SIDE, 3), np.uint8), **dict.fromkeys(label_keys, _LABEL)}
    records = ByteArray(path, 0, (size // record_bytes, record_bytes))
    return RowFilesOp((records,), partial(_cifar_examples, label_keys), spec)


def _cifar_examples(label_keys: tuple[str, ...], records: Array) -> Mapping[str, Array]:
    images = records[:, len(label_keys) :].reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1)
    labels = {key: records[:, number].astype(np.int64) for number, key in enumerate(label_keys)}
    return {"image": np.ascontiguousarray(images), **labels}


@final
@dataclass(frozen=True, eq=False)
class RowFilesOp(IndexedSourceOp):
    """The examples that `examples` makes of the rows of arrays in files."""

    arrays: tuple[ByteArray, ...]  # of one first dimension
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
class _RowAccess(RandomAccess):
    portable: ClassVar[bool] = True
    arrays: tuple[ByteArray, ...]
    examples: Callable[..., Mapping[str, Array]]
    spec: Mapping[str, TensorSpec]

    def __len__(self) -> int:
        return self.arrays[0].shape[0]

    def __getstate__(self) -> dict[str, Any]:
        return {"arrays": self.arrays, "examples": self.examples, "spec": self.spec}  # without loaded arrays

    @cached_property
    def _loaded(self) -> list[Array] | DataLossError:
        """The arrays, or the error: a damaged file is not read again for each of its rows."""
        try:
            return [array.load() for array in self.arrays]
        except DataLossError as loss:
            return loss.with_traceback(None)

    def gather(self, indices: Any) -> Block:
        loaded = self._loaded
        if isinstance(loaded, DataLossError):
            raise copy.copy(loaded)
        for array in self.arrays:
            if array.mapped is not None:
                array.mapped.require_whole()
        rows = slice(int(indices[0]), int(indices[-1]) + 1) if is_consecutive(indices) else indices
        columns, structure = flatten_element(self.examples(*(array[rows] for array in loaded)))
        specs, _ = flatten_element(self.spec)
        return Block(structure, tuple(specs), tuple(columns), len(indices))
