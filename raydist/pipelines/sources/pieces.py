"""Reading the records of one file piece by piece, where every piece knows where it begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from raydist.pipelines.sources.file_format import RecordReader

__all__ = ["Piece", "PieceReader"]


@final
@dataclass(frozen=True, slots=True)
class Piece:
    """Some neighbouring records.

    Attributes:
        records: In order; may be none.
        error: Stands at the place after them, if any.
        offset: Where reading goes on behind the piece.
        index: Number of the record there.
        ended: There is nothing behind it.
    """

    records: Sequence[bytes]
    error: Exception | None
    offset: int
    index: int
    ended: bool


@final
class PieceReader:
    """Reads pieces; a file that cannot be opened is one piece with an error."""

    def __init__(self, open_reader: Callable[[], RecordReader]) -> None:
        self._open_reader = open_reader
        self._reader: RecordReader | None = None

    def read(self, limit: int) -> Piece:
        """The next piece, of up to `limit` records. Not to be called after one that ended."""
        if self._reader is None:
            try:
                self._reader = self._open_reader()
            except Exception as failure:  # a missing file, a directory, ...
                return Piece((), failure, 0, 0, ended=True)
        records, error = self._reader.read(limit)
        ended = self._reader.ended or (not records and error is None)
        return Piece(records, error, self._reader.offset, self._reader.index, ended)

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._reader is not None:
            self._reader.close()
