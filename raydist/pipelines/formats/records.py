"""Readers of files of records: the base class, records of one size, and lines of text."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod

from raydist.core.errors import DataLossError
from raydist.pipelines.formats.byte_streams import ByteStream
from raydist.pipelines.formats.files import data_loss

BLOCK_BYTES = 1 << 22  # one call of `read` stops after this many bytes
CHUNK_BYTES = 1 << 18  # read from the stream at a time
_GZIP_START = b"\x1f\x8b\x08"  # text never begins like this


class SkippedRecordError(Exception):
    """Raised for damage inside one record, whose end is known: reading goes on after it."""

    def __init__(self, loss: DataLossError) -> None:
        super().__init__(str(loss))
        self.loss = loss


class RecordReader(ABC):
    """A reader of the records of one file, in order.

    Attributes:
        offset: Start of the next record, in decompressed bytes: a position from which to resume.
        index: Number of the next record.
        ended: True if nothing more can be read: at the end, or after damage that hides the next record.
    """

    def __init__(self, stream: ByteStream, offset: int, index: int) -> None:
        """Continue at `offset`, the start of record `index`."""
        stream.skip(offset)
        self.offset = offset
        self.index = index
        self.ended = False
        self._stream = stream

    def read(self, limit: int) -> tuple[list[bytes], Exception | None]:
        """Return up to `limit` records (and about 4 MiB), and the error that follows them, if any.

        A record in which only the data is damaged is skipped after its error. After any other error nothing more can be
        read. At the end, return no record and no error.
        """
        records: list[bytes] = []
        start = self.offset
        try:
            while len(records) < limit and self.offset - start < BLOCK_BYTES and not self.ended:
                self._advance(records, limit)
        except SkippedRecordError as skipped:
            return records, skipped.loss
        except Exception as error:  # I/O errors also take the place of the data
            self.ended = True
            return records, error
        return records, None

    @abstractmethod
    def _advance(self, records: list[bytes], limit: int) -> None:
        """Append some of the next records, to at most `limit`, or set `ended`."""

    def close(self) -> None:
        self._stream.close()


class FixedRecordReader(RecordReader):
    """A reader of records of one size, between a header and a footer. Offset 0 stands for the first record."""

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
        super().__init__(stream, max(offset, header_bytes), index)
        self._record_bytes = record_bytes
        self._footer_bytes = footer_bytes
        self._buffer = b""
        self._at = 0

    def _advance(self, records: list[bytes], limit: int) -> None:
        size = self._record_bytes
        in_buffer = (self._fill(size + self._footer_bytes) - self._footer_bytes) // size
        if in_buffer <= 0:
            self._check_end()
            return
        end = self._at + size * min(in_buffer, limit - len(records))
        taken = [self._buffer[start : start + size] for start in range(self._at, end, size)]
        records += taken
        self.index += len(taken)
        self.offset += end - self._at
        self._at = end

    def _fill(self, size: int) -> int:
        """Fill the buffer with `size` bytes or more, if the file has as many; return the number of bytes."""
        missing = size - (len(self._buffer) - self._at)
        if missing > 0:
            parts = [self._buffer[self._at :]]
            while missing > 0 and not self.ended:
                parts.append(self._stream.read(CHUNK_BYTES))
                missing -= len(parts[-1])
                self.ended = not parts[-1]
            self._buffer, self._at = b"".join(parts), 0
        return len(self._buffer) - self._at

    def _check_end(self) -> None:
        left = len(self._buffer) - self._at
        if left != self._footer_bytes:
            raise data_loss(
                self._stream.path,
                self.offset,
                f"A file must end with a whole record of {self._record_bytes} bytes and a footer of "
                f"{self._footer_bytes}, but {left} bytes follow {self.index} whole records",
            )


class LineReader(RecordReader):
    """A reader of lines, without their ends: \\n or \\r\\n. The numbers of lines count from 0.

    Attributes:
        starts: Offsets of the lines that the last call of `read` returned.
    """

    def __init__(
        self, stream: ByteStream, *, offset: int = 0, index: int = 0, max_line_bytes: int | None = None
    ) -> None:
        """Continue at `offset`, the start of line `index`. `max_line_bytes` defaults to the limit of the stream."""
        super().__init__(stream, offset, index)
        self.starts: list[int] = []
        self._max_line_bytes = stream.piece_limit() if max_line_bytes is None else max_line_bytes
        self._chunk = b""
        self._at = 0
        self._begun = io.BytesIO()  # start of a line from earlier chunks

    @property
    def path(self) -> str:
        return self._stream.path

    def read(self, limit: int) -> tuple[list[bytes], Exception | None]:
        self.starts = []
        return super().read(limit)

    def _advance(self, records: list[bytes], limit: int) -> None:
        """Append the lines that end in the chunk, and read the next chunk."""
        while len(records) < limit:
            end = self._chunk.find(b"\n", self._at)
            if end < 0:
                self._next_chunk(records)
                return
            self._append(records, self._chunk[self._at : end], ending=1)
            self._at = end + 1

    def _append(self, lines: list[bytes], tail: bytes, *, ending: int) -> None:
        line = tail
        if self._begun.tell():
            self._begun.write(tail)
            line = self._begun.getvalue()  # not copied
            self._begun = io.BytesIO()
        self.starts.append(self.offset)
        self.offset += len(line) + ending
        self.index += 1
        lines.append(line[:-1] if ending and line.endswith(b"\r") else line)

    def _next_chunk(self, lines: list[bytes]) -> None:
        """Keep the incomplete line and read on; at the end of the file it is the last line."""
        rest = self._chunk[self._at :]
        self._chunk, self._at = b"", 0
        if self._begun.tell() + len(rest) > self._max_line_bytes:
            raise data_loss(
                self.path,
                self.offset,
                f"A line may have at most {self._max_line_bytes} bytes, but line {self.index} has more. "
                "Is this a text file? Raise max_line_bytes if it is right",
            )
        self._begun.write(rest)
        self._chunk = self._stream.read(CHUNK_BYTES)
        if not self._chunk:
            self.ended = True
            if self._begun.tell():
                self._append(lines, b"", ending=0)
        elif self.offset == 0 and not self._begun.tell() and self._chunk.startswith(_GZIP_START):
            raise data_loss(
                self.path,
                0,
                f"A text file must hold text, but this one looks compressed ({self._chunk[:4]!r}): try "
                "compression_type='GZIP'",
            )
