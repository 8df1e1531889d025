"""One file among those that a dataset of records reads in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from raydist.pipelines.elements.items import ElementError
from raydist.pipelines.sources.file_format import RecordReader
from raydist.pipelines.sources.file_sizes import local_size
from raydist.pipelines.sources.pieces import Piece, PieceReader
from raydist.pipelines.sources.pieces_ahead import PiecesAhead

__all__ = ["OpenRecords", "RecordSlot"]

OpenRecords = Callable[[str, int, int], RecordReader]
"""Opens the file of a path at an offset, the start of the record of an index."""

_SKIPPED_RECORDS = 1024  # read at a time on the way to where a state was saved


@final
class RecordSlot:
    """Hands out the records of one file, from its turn on or read ahead by a thread.

    Attributes:
        number: Which file of all it is.
        ended: Its last record, or the error that ends it, was handed out, and that there is no more was seen.
    """

    def __init__(
        self,
        open_records: OpenRecords,
        number: int,
        path: str | ElementError,
        position: tuple[int, int, int] = (0, 0, 0),
        *,
        ahead: bool,
        size: int = 0,
    ) -> None:
        """What `state` said: `position`, offset and index to begin at and records to pass over there; `size`."""
        self.number = number
        self.ended = False
        offset, index, self._to_pass = position
        self._begin = (offset, index)  # of the piece at hand
        self._at = 0  # records of it handed out
        self._piece: Piece | None = None
        self._error = path.error if isinstance(path, ElementError) else None
        text = "" if isinstance(path, ElementError) else path

        self._size = size or local_size(text)

        def open_reader() -> RecordReader:
            return open_records(text, offset, index)

        self._ahead = PiecesAhead(open_reader, text) if ahead else None
        self._here = PieceReader(open_reader)

    def start(self) -> None:
        """Begin to read ahead, where that is wanted. May be called again."""
        if self._ahead is not None and self._error is None:
            self._ahead.start()

    def ready(self) -> int:
        """Records at hand."""
        return 0 if self._piece is None or self._to_pass else len(self._piece.records) - self._at

    def take(self, limit: int) -> list[bytes]:
        """Up to `limit` of the records at hand."""
        if self._piece is None:
            return []
        taken = self._piece.records[self._at : self._at + limit]
        self._at += len(taken)
        if self._at == len(self._piece.records) and self._piece.error is None and not self._piece.ended:
            self._pass_piece()
        return list(taken)

    def read(self, limit: int) -> tuple[list[bytes], Exception | None]:
        """Up to `limit` next records, and the error that stands after them. Neither of both: the end."""
        while not self.ready():
            error = self._take_error()
            if error is not None or self.ended:
                return [], error
            self._next_piece(limit)
        return self.take(limit), None

    def _take_error(self) -> Exception | None:
        """The error that comes next, once; afterwards, and behind the last record, the file has `ended`."""
        error, piece = self._error, self._piece
        if error is None and piece is not None and not self._to_pass:
            error = piece.error
        if error is not None or (piece is not None and not self._to_pass):
            self.ended = piece is None or piece.ended
            self._error = None
            self._pass_piece()
        return error

    def _next_piece(self, limit: int) -> None:
        self._pass_piece()
        if self._ahead is not None:
            piece = self._ahead.read()
        else:
            piece = self._here.read(max(limit, min(self._to_pass, _SKIPPED_RECORDS)))
        self._at = min(self._to_pass, len(piece.records))
        self._to_pass = 0 if piece.ended else self._to_pass - self._at
        self._piece = piece

    def _pass_piece(self) -> None:
        """Behind a piece the next one begins."""
        if self._piece is not None:
            self._begin, self._at = (self._piece.offset, self._piece.index), 0
            self._piece = None

    def state(self) -> list[int]:
        """Which file, where the piece at hand begins in it, how many of its records were handed out, and its size."""
        return [self.number, *self._begin, self._at + self._to_pass, self._size]

    def close(self) -> None:
        """Close the file."""
        self._here.close()
        if self._ahead is not None:
            self._ahead.close()
