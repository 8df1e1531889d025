"""Files in chunks: every byte belongs to one chunk, and every chunk has a checksum that is verified before use."""

from __future__ import annotations

from typing import BinaryIO, NamedTuple, final

import google_crc32c

from raydist.pipelines.formats.files import ReadableFile, data_loss, file_errors

__all__ = ["Chunk", "ChunkWriter", "crc32c", "read_chunk"]


class Chunk(NamedTuple):
    """A byte range of a file.

    Attributes:
        offset: Offset of the first byte.
        size: Number of bytes.
        crc32c: CRC-32C of these bytes.
        rows: Number of elements; 0 for data without elements, such as a schema.
        raw_size: Bytes before compression.
    """

    offset: int
    size: int
    crc32c: int
    rows: int
    raw_size: int


def crc32c(data: bytes | memoryview) -> int:
    """Return the CRC-32C of `data`.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    value: int = google_crc32c.value(bytes(data))
    return value


@final
class ChunkWriter:
    """A file-like object that computes a checksum for each chunk. Has the methods that pyarrow needs."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self.path = path
        self.chunks: list[Chunk] = []
        self.closed = False
        self._file = file
        self._start = self._at = 0
        self._crc = 0

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes; return their number."""
        content = bytes(data)
        with file_errors(self.path, self._at):
            self._file.write(content)
        self._crc = google_crc32c.extend(self._crc, content)
        self._at += len(content)
        return len(content)

    def end_chunk(self, rows: int, raw_size: int | None = None) -> None:
        """End a chunk of all bytes since the last call. Does nothing if there are none."""
        size = self._at - self._start
        if size:
            self.chunks.append(Chunk(self._start, size, self._crc, rows, size if raw_size is None else raw_size))
            self._start = self._at
            self._crc = 0

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._at

    def writable(self) -> bool:
        """Return True, for pyarrow."""
        return True

    def readable(self) -> bool:
        """Return False, for pyarrow."""
        return False

    def seekable(self) -> bool:
        """Return False, for pyarrow."""
        return False

    def flush(self) -> None:
        """Do nothing: the owner of the file closes it."""

    def close(self) -> None:
        """Do nothing: the owner of the file closes it."""


def read_chunk(file: ReadableFile, path: str, chunk: Chunk) -> bytes:
    """Return the bytes of a chunk.

    Raises:
        DataLossError: The bytes are incomplete, or their checksum differs.
    """
    with file_errors(path, chunk.offset):
        file.seek(chunk.offset)
        parts: list[bytes] = []
        missing = chunk.size
        while missing and (part := file.read(missing)):
            parts.append(part)
            missing -= len(part)
    data = parts[0] if len(parts) == 1 else b"".join(parts)
    if missing:
        raise data_loss(path, chunk.offset, f"A chunk must have {chunk.size} bytes, but {missing} of them are missing")
    if crc32c(data) != chunk.crc32c:
        problem = f"The checksum of a chunk of {chunk.rows} elements must match. Restore the file or write it anew"
        raise data_loss(path, chunk.offset, problem)
    return data
