"""Reading the records of one file in pieces, each with the position of its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from raydist.pipelines.elements.columns import Column, object_column
from raydist.pipelines.sources.file_format import RecordReader

__all__ = ["Piece", "PieceReader"]


@final
@dataclass(frozen=True, slots=True)
class Piece:
    """Some consecutive records.

    Attributes:
        records: Records in order, as a column of bytes; may be empty.
        error: Error that follows the records, if any.
        offset: Position of the next piece in the file.
        index: Number of the record at `offset`.
        ended: True if no piece follows.
    """

    records: Column
    error: Exception | None
    offset: int
    index: int
    ended: bool


@final
class PieceReader:
    """A reader of pieces. A file that cannot be opened is one piece with an error."""

    def __init__(self, open_reader: Callable[[], RecordReader]) -> None:
        self._open_reader = open_reader
        self._reader: RecordReader | None = None

    def read(self, limit: int) -> Piece:
        """Return the next piece, of up to `limit` records. Must not be called after a piece that ended."""
        if self._reader is None:
            try:
                self._reader = self._open_reader()
            except Exception as failure:  # such as a missing file or a directory
                return Piece(object_column([]), failure, 0, 0, ended=True)
        records, error = self._reader.read(limit)
        ended = self._reader.ended or (not records and error is None)
        return Piece(object_column(records), error, self._reader.offset, self._reader.index, ended)

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._reader is not None:
            self._reader.close()
