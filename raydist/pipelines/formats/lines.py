"""Reading of text as lines of bytes, and the interface of parsers that make rows from lines."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, final

import pyarrow as pa

from raydist.errors import InvalidArgumentError
from raydist.pipelines.formats.byte_streams import ByteStream
from raydist.pipelines.formats.files import data_loss

__all__ = ["LineParser", "LineReader", "require_line_limit"]

_CHUNK_BYTES = 1 << 18
_BLOCK_BYTES = 1 << 22  # one call of `read` stops after this many bytes
_GZIP_START = b"\x1f\x8b\x08"  # text never begins like this


@final
class LineReader:
    """A reader of the lines of one file, in order, without their ends: \\n or \\r\\n.

    Attributes:
        offset: Start of the next line, in decompressed bytes: a position from which to resume.
        index: Number of the next line, from 0.
        ended: True if nothing more can be read.
        starts: Offsets of the lines that the last call of `read` returned.
    """

    def __init__(
        self, stream: ByteStream, *, offset: int = 0, index: int = 0, max_line_bytes: int | None = None
    ) -> None:
        """Continue at `offset`, the start of line `index`. `max_line_bytes` defaults to the limit of the stream."""
        stream.skip(offset)
        self.offset = offset
        self.index = index
        self.ended = False
        self.starts: list[int] = []
        self._stream = stream
        self._max_line_bytes = stream.piece_limit() if max_line_bytes is None else max_line_bytes
        self._chunk = b""
        self._at = 0
        self._begun = io.BytesIO()  # start of a line from earlier chunks

    @property
    def path(self) -> str:
        """The path of the file."""
        return self._stream.path

    def read(self, limit: int) -> tuple[list[bytes], Exception | None]:
        """Return up to `limit` lines (and about 4 MiB), and the error that follows them, if any.

        After an error nothing more can be read. At the end, return no line and no error.
        """
        lines: list[bytes] = []
        self.starts = []
        start = self.offset
        try:
            while len(lines) < limit and self.offset - start < _BLOCK_BYTES and not self.ended:
                self._take(lines, limit)
                if len(lines) < limit:
                    self._next_chunk(lines)
        except Exception as error:  # I/O errors also take the place of the data
            self.ended = True
            return lines, error
        return lines, None

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def _take(self, lines: list[bytes], limit: int) -> None:
        """Append the lines that end in the chunk."""
        while len(lines) < limit:
            end = self._chunk.find(b"\n", self._at)
            if end < 0:
                return
            self._append(lines, self._chunk[self._at : end], ending=1)
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
        if rest:
            self._check_length(len(rest))
            self._begun.write(rest)
        self._chunk = self._stream.read(_CHUNK_BYTES)
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

    def _check_length(self, more: int) -> None:
        if self._begun.tell() + more > self._max_line_bytes:
            raise data_loss(
                self.path,
                self.offset,
                f"A line may have at most {self._max_line_bytes} bytes, but line {self.index} has more. "
                "Is this a text file? Raise max_line_bytes if it is right",
            )


def require_line_limit(max_line_bytes: int | None) -> None:
    """Raise InvalidArgumentError unless `max_line_bytes` is None or >= 1."""
    if max_line_bytes is not None and max_line_bytes < 1:
        raise InvalidArgumentError(f"max_line_bytes must be >= 1 or None, got {max_line_bytes!r}.")


class LineParser(ABC):
    """Interface of a picklable parser of lines with one row each."""

    what: ClassVar[str]
    """Required content of a line, for messages."""

    schema: pa.Schema
    """Schema of the batches."""

    has_header: bool
    """True if the first line of a file is not a row."""

    @abstractmethod
    def parse(self, lines: Sequence[bytes]) -> pa.RecordBatch:
        """Return the rows of lines, at least one, none blank. Raises ArrowException or ValueError for wrong lines."""

    @abstractmethod
    def check_header(self, line: bytes) -> str | None:
        """Return the problem of the first line of a file; None if there is none."""
