"""Reading of records of one size, between a header and a footer."""

from __future__ import annotations

from typing import final

from raydist.pipelines.formats.byte_streams import ByteStream
from raydist.pipelines.formats.files import data_loss

__all__ = ["FixedRecordReader"]

_CHUNK_BYTES = 1 << 18
_BLOCK_BYTES = 1 << 22  # one call of `read` stops after this many bytes


@final
class FixedRecordReader:
    """A reader of the records of one file, in order.

    Attributes:
        offset: Start of the next record, in decompressed bytes: a position from which to resume.
        index: Number of the next record.
        ended: True if nothing more can be read.
    """

    def __init__(
        self,
        stream: ByteStream,
        record_bytes: int,
        header_bytes: int = 0,
        footer_bytes: int = 0,
        *,
        offset: int = 0,
        index: int = 0,
    ) -> None:
        """Continue at `offset`, the start of record `index`; 0 stands for the first record."""
        self.offset = max(offset, header_bytes)
        self.index = index
        self.ended = False
        stream.skip(self.offset)
        self._stream = stream
        self._record_bytes = record_bytes
        self._footer_bytes = footer_bytes
        self._buffer = b""
        self._at = 0

    def read(self, limit: int) -> tuple[list[bytes], Exception | None]:
        """Return up to `limit` records (and about 4 MiB), and the error that follows them, if any.

        After an error nothing more can be read. At the end, return no record and no error.
        """
        records: list[bytes] = []
        most = min(limit, max(1, _BLOCK_BYTES // self._record_bytes))
        try:
            while len(records) < most and self._fill(self._record_bytes + self._footer_bytes):
                start, self._at = self._at, self._at + self._record_bytes
                records.append(self._buffer[start : self._at])
                self.offset += self._record_bytes
                self.index += 1
            if self.ended:
                self._check_end()
        except Exception as error:  # I/O errors also take the place of the data
            self.ended = True
            return records, error
        return records, None

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def _fill(self, size: int) -> bool:
        """Fill the buffer with `size` bytes; return False if the file has fewer."""
        missing = size - (len(self._buffer) - self._at)
        if missing <= 0:
            return True
        parts = [self._buffer[self._at :]]
        while missing > 0 and not self.ended:
            more = self._stream.read(_CHUNK_BYTES)
            parts.append(more)
            missing -= len(more)
            self.ended = not more
        self._buffer, self._at = b"".join(parts), 0
        return missing <= 0

    def _check_end(self) -> None:
        left = len(self._buffer) - self._at
        if left != self._footer_bytes:
            raise data_loss(
                self._stream.path,
                self.offset,
                f"A file must end with a whole record of {self._record_bytes} bytes and a footer of "
                f"{self._footer_bytes}, but {left} bytes are left behind record {self.index - 1}",
            )
