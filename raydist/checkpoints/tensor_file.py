"""safetensors files, written and read in pieces: no second copy of a tensor in memory, and a checksum of each tensor.

Any reader of safetensors can read the files. Large states are split into several files with an index, numbered as by
Hugging Face. If no process has a whole tensor, slices of its rows are stored as `<tensor>[<first row>:<end row>]`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, final

import google_crc32c
import torch

from raydist.checkpoints.dtypes import dtype_name
from raydist.checkpoints.new_files import NewFiles
from raydist.collectives.flat_bytes import flat_bytes
from raydist.failpoints import failpoint

__all__ = [
    "MAX_PART_BYTES",
    "RowRange",
    "TensorFile",
    "FilePlace",
    "plan_parts",
    "write_index",
    "write_safetensors",
    "write_tensor_file",
    "write_tensors",
]

MAX_PART_BYTES = 5 * 10**9
"""Maximum bytes of tensors in one file; the default of Hugging Face."""

_PIECE_BYTES = 1 << 18  # computing a checksum holds the GIL: 0.2 ms at a time, while training steps run
_ALIGNMENT = 8  # of the first tensor: safetensors pads its header to this


@final
@dataclass(frozen=True, slots=True)
class RowRange:
    """A range of rows of a tensor.

    Attributes:
        start: The first row.
        stop: The row after the last.
        of: Number of rows of the whole tensor.
    """

    start: int
    stop: int
    of: int


@final
@dataclass(frozen=True, slots=True)
class FilePlace:
    """The location of a tensor, or of a slice of one, in a file.

    Attributes:
        dtype: safetensors name of the dtype.
        shape: Shape of the whole tensor.
        begin: Offset of the first byte in the file.
        end: Offset after the last byte.
        crc32c: Checksum of the bytes.
        rows: (first row, row after the last) for a slice; None for the whole tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    crc32c: int
    rows: tuple[int, int] | None = None

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return self.end - self.begin

    @property
    def slice_shape(self) -> tuple[int, ...]:
        """Shape of the slice, or of the whole tensor if it is not divided."""
        return self.shape if self.rows is None else (self.rows[1] - self.rows[0], *self.shape[1:])


@final
@dataclass(frozen=True, slots=True)
class TensorFile:
    """A file as it was written.

    Attributes:
        name: Name in the directory.
        num_bytes: Size of the file.
        crc32c: Checksum of the whole file.
        header_bytes: Size of the header before the tensors.
        header_crc32c: Checksum of the header.
        tensors: Locations of the file's tensors by name; empty for an index.
    """

    name: str
    num_bytes: int
    crc32c: int
    header_bytes: int
    header_crc32c: int
    tensors: dict[str, FilePlace] = field(default_factory=dict)


def plan_parts(sizes: Mapping[str, int], max_part_bytes: int = MAX_PART_BYTES) -> list[list[str]]:
    """Divide tensors, in order, into files: each takes as many tensors as fit, and at least one.

    >>> plan_parts({"a": 3, "b": 3, "c": 9, "d": 1}, 6)
    [['a', 'b'], ['c'], ['d']]
    """
    parts: list[list[str]] = []
    room = -1
    for name, size in sizes.items():
        if size > room:
            parts.append([])
            room = max_part_bytes
        parts[-1].append(name)
        room -= size
    return parts or [[]]


def write_tensors(
    new: NewFiles, name: str, tensors: Mapping[str, torch.Tensor], max_part_bytes: int = MAX_PART_BYTES
) -> tuple[TensorFile, ...]:
    """Write tensors into as many files as needed, and an index if there are several.

    Args:
        new: Directory and names of the files.
        name: Name of the files, without number and ending.
        tensors: Tensors on any device.
        max_part_bytes: Maximum bytes of tensors in one file.
    """
    parts = plan_parts({key: tensor.nbytes for key, tensor in tensors.items()}, max_part_bytes)
    if len(parts) == 1:
        return (write_tensor_file(new, new.named(name, ".safetensors"), tensors),)
    files = tuple(
        write_tensor_file(new, new.part_named(name, number, len(parts)), {key: tensors[key] for key in keys})
        for number, keys in enumerate(parts)
    )
    return (*files, write_index(new, name, files))


def write_index(new: NewFiles, name: str, files: tuple[TensorFile, ...]) -> TensorFile:
    """Write the Hugging Face index of one state's files, which maps tensors to files."""
    total = sum(place.end - place.begin for file in files for place in file.tensors.values())
    index = {
        "metadata": {"total_size": total},
        "weight_map": {
            _name_in_file(key, place.rows): file.name for file in files for key, place in file.tensors.items()
        },
    }
    content = json.dumps(index, indent=2).encode()
    target = new.named(name, ".safetensors.index.json")
    new.files.write(target, lambda file: file.write(content))
    crc = google_crc32c.value(content)
    return TensorFile(target, len(content), crc, len(content), crc)


def write_tensor_file(
    new: NewFiles,
    name: str,
    tensors: Mapping[str, torch.Tensor],
    rows: Mapping[str, RowRange] | None = None,
) -> TensorFile:
    """Write one file with exactly this name.

    Args:
        new: Directory of the file.
        name: Name of the file; see `NewFiles.named`.
        tensors: Tensors on any device.
        rows: Row ranges of tensors that are slices.
    """
    return new.files.write(name, lambda file: write_safetensors(file, name, tensors, rows))


def write_safetensors(
    file: BinaryIO,
    name: str,
    tensors: Mapping[str, torch.Tensor],
    rows: Mapping[str, RowRange] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> TensorFile:
    """Write tensors into an open file.

    Args:
        file: The file.
        name: Name of the file.
        tensors: Tensors on any device.
        rows: See `write_tensor_file`.
        metadata: Texts for the header; by default the format of torch tensors.
    """
    return _Layout(dict(tensors), rows or {}, metadata or {}).write(file, name)


@final
class _Layout:
    """The layout of a file: tensors with large elements first, so that all tensors are aligned."""

    def __init__(
        self, tensors: dict[str, torch.Tensor], rows: Mapping[str, RowRange], metadata: Mapping[str, str]
    ) -> None:
        self._metadata = dict(metadata) or {"format": "pt"}
        order = sorted(tensors, key=lambda key: -tensors[key].element_size())
        self._tensors = {key: tensors[key] for key in order}
        self._rows = rows

    def write(self, file: BinaryIO, name: str) -> TensorFile:
        header = self._header()
        writer = _Writer(file)
        header_crc = writer.write(memoryview(header))
        places = {}
        for key, tensor in self._tensors.items():
            begin = writer.at
            crc = writer.write(_bytes_of(tensor))
            places[key] = self._place(key, tensor, begin, writer.at, crc)
        return TensorFile(name, writer.at, writer.crc, len(header), header_crc, places)

    def _place(self, key: str, tensor: torch.Tensor, begin: int, end: int, crc: int) -> FilePlace:
        rows = self._rows.get(key)
        shape = tuple(tensor.shape) if rows is None else (rows.of, *tensor.shape[1:])
        between = None if rows is None else (rows.start, rows.stop)
        return FilePlace(dtype_name(tensor.dtype), shape, begin, end, crc, between)

    def _header(self) -> bytes:
        content: dict[str, Any] = {"__metadata__": self._metadata}
        at = 0
        for key, tensor in self._tensors.items():
            rows = self._rows.get(key)
            name = _name_in_file(key, None if rows is None else (rows.start, rows.stop))
            dtype, shape = dtype_name(tensor.dtype), list(tensor.shape)
            content[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + tensor.nbytes]}
            at += tensor.nbytes
        text = json.dumps(content, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text


def _name_in_file(key: str, rows: tuple[int, int] | None) -> str:
    return key if rows is None else f"{key}[{rows[0]}:{rows[1]}]"


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat: Any = flat_bytes(tensor.detach().cpu()).numpy()
    return memoryview(flat)


@final
class _Writer:
    """A file with a running checksum."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.crc = self.at = 0

    def write(self, data: memoryview) -> int:
        """Append bytes and return their checksum."""
        crc = 0
        for piece in _pieces(data):
            self._file.write(piece)
            self.at += len(piece)
            content = bytes(piece)  # the package needs bytes; a piece stays in the CPU cache
            crc = google_crc32c.extend(crc, content)
            self.crc = google_crc32c.extend(self.crc, content)
            failpoint("checkpoint.within_file")
        return crc


def _pieces(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), _PIECE_BYTES):
        yield data[start : start + _PIECE_BYTES]
