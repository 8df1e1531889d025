"""Read tensors from the files of a checkpoint. Checksums are verified before a tensor is returned."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any, final

import google_crc32c
import torch

from raydist.checkpoints.entries import stored_dtype
from raydist.checkpoints.tensor_file import FilePlace, TensorFile
from raydist.collectives.tensors import flat_bytes
from raydist.core.errors import DataLossError, NotFoundError
from raydist.pipelines.formats.files import OpenFile, file_errors
from raydist.pipelines.stored.directory_files import DirectoryFiles

_PIECE_BYTES = 1 << 20


def read_tensors(directory: DirectoryFiles, files: Iterable[TensorFile]) -> dict[str, torch.Tensor]:
    """Return the tensors of one object, on the CPU, in memory of their own.

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
            reader.check_header()
            for key, place in file.tensors.items():
                if key not in tensors:
                    tensors[key] = torch.empty(place.shape, dtype=stored_dtype(place.dtype))
                reader.fill(tensors[key] if place.rows is None else tensors[key][slice(*place.rows)], key)
    return tensors


def read_slices(directory: DirectoryFiles, file: TensorFile, keys: Collection[str]) -> dict[str, torch.Tensor]:
    """Return tensors or slices in one file, on the CPU. Also verifies the file's header; only that without keys.

    Raises:
        DataLossError: The file is missing, truncated or damaged; the message names the file and the tensor.
    """
    found: dict[str, torch.Tensor] = {}
    with _opened(directory, file) as reader:
        reader.check_header()
        for key, place in file.tensors.items():
            if key in keys:
                found[key] = torch.empty(place.slice_shape, dtype=stored_dtype(place.dtype))
                reader.fill(found[key], key)
    return found


def read_pieces(
    directory: DirectoryFiles, file: TensorFile, keys: Collection[str]
) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield one file's parts of several tensors, about 1 MiB at a time. Does not verify the file's header.

    Yields:
        Name of the tensor, index of the first row in the piece, and the piece; for a scalar, 0 and the scalar.

    Raises:
        DataLossError: The file is missing or truncated; or, after the last piece of a tensor, the checksum differs.
    """
    with _opened(directory, file) as reader:
        for key, place in file.tensors.items():
            if key not in keys:
                continue
            first = 0 if place.rows is None else place.rows[0]
            for piece in reader.pieces(key):
                yield key, first, piece
                first += len(piece) if piece.dim() else 0


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

    def check_header(self) -> None:
        """Raise DataLossError if the header differs. Called before the tensors are read."""
        crc, left = 0, self._file.header_bytes
        while left:
            piece = self._some(min(left, _PIECE_BYTES), "its header")
            crc = google_crc32c.extend(crc, piece)
            left -= len(piece)
        if crc != self._file.header_crc32c:
            raise self._loss("its header differs from what was written", 0)

    def fill(self, target: torch.Tensor, key: str) -> None:
        """Read and verify the file's rows of a tensor into contiguous memory of their shape."""
        place = self._file.tensors[key]
        self._go_to(place.begin)
        self._require(self._read_into(target, f"tensor {key!r}", 0), place, key)

    def pieces(self, key: str) -> Iterator[torch.Tensor]:
        """Yield the file's rows of a tensor, or a scalar; verify the checksum after the last."""
        place = self._file.tensors[key]
        count, *row = place.slice_shape or (1,)
        step = max(1, _PIECE_BYTES * count // max(1, place.num_bytes))
        self._go_to(place.begin)
        crc = 0
        for begin in range(0, count, step):
            shape = (min(step, count - begin), *row) if place.shape else ()
            rows = torch.empty(shape, dtype=stored_dtype(place.dtype))
            crc = self._read_into(rows, f"tensor {key!r}", crc)
            yield rows
        self._require(crc, place, key)

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

    def _require(self, crc: int, place: FilePlace, key: str) -> None:
        if crc != place.crc32c:
            raise self._loss(f"tensor {key!r} differs from what was written", place.begin)

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
