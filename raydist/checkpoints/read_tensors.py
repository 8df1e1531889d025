"""Read tensors from the files of a checkpoint, and verify their checksums."""

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
    """Return the tensors of one object, on the CPU, in newly allocated memory.

    Raises:
        DataLossError: A file is missing, truncated or damaged; the message names the file and the tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    several = tuple(files)
    if len(several) > 1:  # check that all files exist before allocating whole tensors
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
    """Return the tensors or slices with these names in one file, on the CPU. Verify the file's header, too.

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
    """Yield the tensors with these names in one file, in pieces of about 1 MiB. Do not verify the file's header.

    Yields:
        Name of the tensor, index of the piece's first row in the tensor, and the piece. For a scalar: name, 0, scalar.

    Raises:
        DataLossError: The file is missing or truncated. After the last piece of a tensor: the checksum differs.
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
            f"A checkpoint must have all of its files, but {path!r} is missing. Use another checkpoint or a copy.",
            path=path,
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
        self._offset = 0

    def check_size(self) -> None:
        """Raise DataLossError if the file system reports a size other than the written size."""
        if self._opened.size not in (None, self._file.num_bytes):
            raise self._data_loss(f"it must have {self._file.num_bytes} bytes, got {self._opened.size}", 0)

    def check_header(self) -> None:
        """Raise DataLossError if the header's checksum differs. Call this method before reading tensors."""
        crc, left = 0, self._file.header_bytes
        while left:
            piece = self._read_piece(min(left, _PIECE_BYTES), "its header")
            crc = google_crc32c.extend(crc, piece)
            left -= len(piece)
        if crc != self._file.header_crc32c:
            raise self._data_loss("its header differs from what was written", 0)

    def fill(self, target: torch.Tensor, key: str) -> None:
        """Read the file's rows of a tensor into contiguous memory of their shape, and verify the checksum."""
        place = self._file.tensors[key]
        self._seek(place.begin)
        self._require_checksum(self._read_into(target, f"tensor {key!r}", 0), place, key)

    def pieces(self, key: str) -> Iterator[torch.Tensor]:
        """Yield the file's rows of a tensor in pieces, or a scalar; verify the checksum after the last piece."""
        place = self._file.tensors[key]
        count, *row = place.slice_shape or (1,)
        step = max(1, _PIECE_BYTES * count // max(1, place.num_bytes))
        self._seek(place.begin)
        crc = 0
        for begin in range(0, count, step):
            shape = (min(step, count - begin), *row) if place.shape else ()
            rows = torch.empty(shape, dtype=stored_dtype(place.dtype))
            crc = self._read_into(rows, f"tensor {key!r}", crc)
            yield rows
        self._require_checksum(crc, place, key)

    def _seek(self, begin: int) -> None:
        if self._offset != begin:
            self._opened.file.seek(begin)
            self._offset = begin

    def _read_into(self, target: torch.Tensor, what: str, crc: int) -> int:
        flat: Any = flat_bytes(target).numpy()
        done = 0
        while done < len(flat):
            piece = self._read_piece(min(len(flat) - done, _PIECE_BYTES), what)
            memoryview(flat)[done : done + len(piece)] = piece
            crc = google_crc32c.extend(crc, piece)
            done += len(piece)
        return crc

    def _require_checksum(self, crc: int, place: FilePlace, key: str) -> None:
        if crc != place.crc32c:
            raise self._data_loss(f"tensor {key!r} differs from what was written", place.begin)

    def _read_piece(self, size: int, what: str) -> bytes:
        piece = bytes(self._opened.file.read(size) or b"")
        if not piece:
            raise self._data_loss(f"{what} is cut off", self._offset)
        self._offset += len(piece)
        return piece

    def _data_loss(self, problem: str, offset: int) -> DataLossError:
        return DataLossError(
            f"The file {self._path!r} of a checkpoint is damaged: {problem}. Use another checkpoint or a copy of the "
            "file.",
            path=self._path,
            offset=offset,
        )
