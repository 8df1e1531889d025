"""Read tensors from the files of a checkpoint. Checksums are verified before a tensor is returned."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, final

import google_crc32c
import torch

from raydist.checkpoints.dtypes import stored_dtype
from raydist.checkpoints.tensor_file import FilePlace, TensorFile
from raydist.collectives.flat_bytes import flat_bytes
from raydist.errors import DataLossError, NotFoundError
from raydist.pipelines.formats.files import OpenFile, file_errors
from raydist.pipelines.stored.directory_files import DirectoryFiles

__all__ = ["read_pieces", "read_rows", "read_slices", "read_tensors"]

_PIECE_BYTES = 1 << 20


def read_tensors(
    directory: DirectoryFiles,
    files: Iterable[TensorFile],
    wanted: Callable[[str], bool] = lambda name: True,
) -> dict[str, torch.Tensor]:
    """Return the tensors of one object, on the CPU, in memory of their own.

    Args:
        directory: Directory of the checkpoint.
        files: Files of the object, from the manifest.
        wanted: Returns True for the name of a tensor to read; default: all.

    Raises:
        DataLossError: A file is missing, truncated or damaged; the message names the file and the tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    several = tuple(files)
    if len(several) > 1:  # slices need memory for the whole tensor: check first that all files exist
        for file in several:
            with _opened(directory, file):
                pass
    for file in several:
        with _opened(directory, file) as reader:
            reader.read_into(tensors, wanted)
    return tensors


def read_slices(directory: DirectoryFiles, file: TensorFile, keys: Collection[str]) -> dict[str, torch.Tensor]:
    """Return one file's tensors or slices of tensors, on the CPU. Also verifies the file's header.

    Args:
        directory: Directory of the checkpoint.
        file: The file, from the manifest.
        keys: Names of the tensors; empty to verify only the header.

    Raises:
        DataLossError: The file is missing, truncated or damaged; the message names the file and the tensor.
    """
    with _opened(directory, file) as reader:
        return reader.read_slices(keys)


def read_rows(directory: DirectoryFiles, file: TensorFile, key: str) -> Iterator[torch.Tensor]:
    """Yield one file's rows of a tensor, about 1 MiB at a time. Does not verify the file's header.

    Args:
        directory: Directory of the checkpoint.
        file: The file, from the manifest.
        key: Name of the tensor, which must have rows.

    Raises:
        DataLossError: The file is missing or truncated; or, after the last row, the checksum differs.
    """
    with _opened(directory, file) as reader:
        yield from reader.rows(key)


def read_pieces(
    directory: DirectoryFiles, file: TensorFile, keys: Collection[str]
) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield one file's parts of several tensors, about 1 MiB at a time. Does not verify the file's header.

    Args:
        directory: Directory of the checkpoint.
        file: The file, from the manifest.
        keys: Names of the tensors.

    Yields:
        Name of the tensor, index of the first row in the piece, and the piece; for a scalar, 0 and the scalar.

    Raises:
        DataLossError: The file is missing or truncated; or, after the last piece of a tensor, the checksum differs.
    """
    with _opened(directory, file) as reader:
        for key in file.tensors:
            if key in keys:
                yield from reader.pieces(key)


@contextlib.contextmanager
def _opened(directory: DirectoryFiles, file: TensorFile) -> Iterator[_FileReader]:
    """Open a file; raise DataLossError if its size is known and wrong."""
    path = f"{directory.shown}/{file.name}"
    try:
        opened = directory.open(file.name)
    except NotFoundError as error:
        raise DataLossError(
            f"A checkpoint must have all of its files, but {path!r} is missing. Use another one or a copy.", path=path
        ) from error
    try:
        with file_errors(path):
            reader = _FileReader(opened, path, file)
            reader.check_size()
            yield reader
    finally:
        opened.file.close()


@final
class _FileReader:
    """A reader of one file."""

    def __init__(self, opened: OpenFile, path: str, file: TensorFile) -> None:
        self._opened = opened
        self._path = path
        self._file = file
        self._at = 0

    def check_size(self) -> None:
        """Raise DataLossError if the file system reports a size other than the written size."""
        if self._opened.size not in (None, self._file.num_bytes):
            raise self._loss(f"it must have {self._file.num_bytes} bytes, got {self._opened.size}", 0)

    def read_into(self, tensors: dict[str, torch.Tensor], wanted: Callable[[str], bool]) -> None:
        """Read the file's tensors into `tensors`, which other files may share."""
        self._check_header()
        for key, place in self._file.tensors.items():
            if wanted(key):
                self._read(key, place, tensors)

    def _check_header(self) -> None:
        crc, left = 0, self._file.header_bytes
        while left:
            piece = self._some(min(left, _PIECE_BYTES), "its header")
            crc = google_crc32c.extend(crc, piece)
            left -= len(piece)
        if crc != self._file.header_crc32c:
            raise self._loss("its header differs from what was written", 0)

    def read_slices(self, keys: Collection[str]) -> dict[str, torch.Tensor]:
        """Return the file's slices of these tensors, each in memory of its own."""
        self._check_header()
        found: dict[str, torch.Tensor] = {}
        for key, place in self._file.tensors.items():
            if key in keys:
                found[key] = torch.empty(place.slice_shape, dtype=stored_dtype(place.dtype))
                self._fill(found[key], key, place)
        return found

    def _read(self, key: str, place: FilePlace, tensors: dict[str, torch.Tensor]) -> None:
        if key not in tensors:
            tensors[key] = torch.empty(place.shape, dtype=stored_dtype(place.dtype))
        self._fill(tensors[key] if place.rows is None else tensors[key][slice(*place.rows)], key, place)

    def pieces(self, key: str) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Yield the file's rows of a tensor with the index of the first row."""
        place = self._file.tensors[key]
        if not place.shape:
            scalar = torch.empty((), dtype=stored_dtype(place.dtype))
            self._fill(scalar, key, place)
            yield key, 0, scalar
            return
        first = 0 if place.rows is None else place.rows[0]
        for rows in self.rows(key):
            yield key, first, rows
            first += len(rows)

    def rows(self, key: str) -> Iterator[torch.Tensor]:
        """Yield the file's rows of a tensor; verify the checksum after the last."""
        place, what = self._file.tensors[key], f"tensor {key!r}"
        count, *row = place.slice_shape
        step = max(1, _PIECE_BYTES * count // max(1, place.num_bytes))
        self._go_to(place.begin)
        crc = 0
        for begin in range(0, count, step):
            rows = torch.empty((min(step, count - begin), *row), dtype=stored_dtype(place.dtype))
            crc = self._read_into(rows, what, crc)
            yield rows
        self._require(crc, place, what)

    def _fill(self, target: torch.Tensor, key: str, place: FilePlace) -> None:
        what = f"tensor {key!r}"
        self._go_to(place.begin)
        self._require(self._read_into(target, what, 0), place, what)

    def _go_to(self, begin: int) -> None:
        if self._at != begin:
            self._opened.file.seek(begin)
            self._at = begin

    def _read_into(self, target: torch.Tensor, what: str, crc: int) -> int:
        flat: Any = flat_bytes(target).numpy()
        done = 0
        while done < len(flat):
            piece = self._some(min(len(flat) - done, _PIECE_BYTES), what)
            memoryview(flat)[done : done + len(piece)] = piece
            crc = google_crc32c.extend(crc, piece)
            done += len(piece)
        return crc

    def _require(self, crc: int, place: FilePlace, what: str) -> None:
        if crc != place.crc32c:
            raise self._loss(f"{what} differs from what was written", place.begin)

    def _some(self, size: int, what: str) -> bytes:
        piece = bytes(self._opened.file.read(size) or b"")
        if not piece:
            raise self._loss(f"{what} is cut off", self._at)
        self._at += len(piece)
        return piece

    def _loss(self, problem: str, offset: int) -> DataLossError:
        return DataLossError(
            f"The file {self._path!r} of a checkpoint must be as it was written, but {problem}. Use another checkpoint "
            "or a copy of the file.",
            path=self._path,
            offset=offset,
        )
