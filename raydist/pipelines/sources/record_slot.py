"""One slot of a dataset of records: a file that is read in turn with others."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import final

from raydist.ending_threads import end_at_exit
from raydist.errors import DeadlineExceededError
from raydist.options import Timeouts
from raydist.pipelines.elements.columns import Column, object_column
from raydist.pipelines.elements.items import ElementError
from raydist.pipelines.sources.file_format import RecordReader
from raydist.pipelines.sources.file_sizes import local_size
from raydist.pipelines.sources.pieces import Piece, PieceReader
from raydist.pipelines.sources.pieces_on_workers import PiecesOnWorkers, ReadingStage

__all__ = ["OpenRecords", "PiecesAhead", "RecordSlot"]

_PIECES = 2  # kept ready: one is handed out while the thread reads the next
_PIECE_BYTES = 1 << 20
_FIRST_RECORDS = 16  # in a piece, before the size of a record is known
_MAX_RECORDS = 1024


@final
class _Shelf:
    """The state shared by two threads. The reading thread opens the file and closes it."""

    def __init__(self, open_reader: Callable[[], RecordReader]) -> None:
        self.open_reader = open_reader
        self.changed = threading.Condition()
        self.pieces: deque[Piece] = deque()
        self.failure: BaseException | None = None
        self.stopped = False

    def wait_for_room(self) -> bool:
        """Wait for room; return True if another piece is wanted, False after `stop`."""
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or len(self.pieces) < _PIECES)
            return not self.stopped

    def put(self, piece: Piece) -> None:
        with self.changed:
            self.pieces.append(piece)
            self.changed.notify_all()

    def fail(self, failure: BaseException) -> None:
        with self.changed:
            self.failure = failure
            self.changed.notify_all()

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.pieces.clear()
            self.changed.notify_all()


def _read(shelf: _Shelf) -> None:
    """Run the reading thread. It refers only to the shelf, so that an abandoned reader is collected and stops it."""
    reader = PieceReader(shelf.open_reader)
    limit = _FIRST_RECORDS
    try:
        while shelf.wait_for_room():
            piece = reader.read(limit)
            shelf.put(piece)
            if piece.ended:
                break
            if len(piece.records):
                mean = sum(map(len, piece.records)) // len(piece.records)
                limit = max(1, min(_MAX_RECORDS, _PIECE_BYTES // max(1, mean)))
    except BaseException as failure:  # a thread that ends silently would look like a file without an end
        shelf.fail(failure)
    finally:
        reader.close()


@final
class PiecesAhead:
    """A reader of the pieces of a file; its thread starts with the first call of `start` or `read`."""

    def __init__(self, open_reader: Callable[[], RecordReader], path: str) -> None:
        self._path = path
        self._shelf = _Shelf(open_reader)
        self._thread: threading.Thread | None = None
        self._limits = Timeouts()
        self._finalizer = weakref.finalize(self, self._shelf.stop)

    def start(self) -> None:
        """Start to read. May be called again."""
        if self._thread is None:
            self._thread = threading.Thread(target=_read, args=(self._shelf,), name="raydist-read", daemon=True)
            end_at_exit(self._thread, self._finalizer)
            self._thread.start()

    def read(self) -> Piece:
        """Return the next piece, which may be the last. Blocks up to `Timeouts.input_s`."""
        self.start()
        shelf = self._shelf
        with shelf.changed:
            if not shelf.changed.wait_for(lambda: shelf.pieces or shelf.failure, self._limits.input_s):
                raise DeadlineExceededError(
                    f"The next records of {self._path!r} must be read within {self._limits.input_s} s, and were not. "
                    "Its file system does not answer."
                )
            if not shelf.pieces and shelf.failure is not None:
                raise shelf.failure
            piece = shelf.pieces.popleft()
            shelf.changed.notify_all()
            return piece

    def close(self) -> None:
        """Stop reading and close the file. May be called twice."""
        self._finalizer()
        if self._thread is not None:
            self._thread.join(self._limits.close_s)


OpenRecords = Callable[[str, int, int], RecordReader]
"""Function that opens the file at a path at an offset, the start of the record with an index."""

_NO_RECORDS = object_column([])
_SKIPPED_RECORDS = 1024  # read at a time while skipping to a saved position


@final
class RecordSlot:
    """A reader of the records of one file: in this thread, ahead in another thread, or by workers.

    Attributes:
        number: Number of the file among all files.
        ended: True once the last record, or the final error, was handed out and the end was seen.
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
        workers: ReadingStage | None = None,
    ) -> None:
        """Set up the reader from the numbers of `state`: `position` (offset, index, records to skip) and `size`."""
        self.number = number
        self.ended = False
        offset, index, self._to_pass = position
        self._begin = (offset, index)  # start of the current piece
        self._at = 0  # number of its records handed out
        self._piece: Piece | None = None
        self._error = path.error if isinstance(path, ElementError) else None
        text = "" if isinstance(path, ElementError) else path

        self._size = size or local_size(text)

        def open_reader() -> RecordReader:
            return open_records(text, offset, index)

        self._ahead: PiecesAhead | PiecesOnWorkers | None = None
        if workers is not None and self._error is None and workers.suits(text):
            self._ahead = PiecesOnWorkers(workers, text, offset, index)
        elif ahead:
            self._ahead = PiecesAhead(open_reader, text)
        self._here = PieceReader(open_reader)

    def start(self) -> None:
        """Start to prefetch, if wanted. May be called again."""
        if self._ahead is not None and self._error is None:
            self._ahead.start()

    def ready(self) -> int:
        """Return the number of records that were read and not taken."""
        return 0 if self._piece is None or self._to_pass else len(self._piece.records) - self._at

    def take(self, limit: int) -> Column:
        """Return up to `limit` of the records that were read."""
        if self._piece is None:
            return _NO_RECORDS
        taken = self._piece.records[self._at : self._at + limit]
        self._at += len(taken)
        if self._at == len(self._piece.records) and self._piece.error is None and not self._piece.ended:
            self._pass_piece()
        return taken

    def read(self, limit: int) -> tuple[Column, Exception | None]:
        """Return up to `limit` records and the error that follows them. At the end, return no record and no error."""
        while not self.ready():
            error = self._take_error()
            if error is not None or self.ended:
                return _NO_RECORDS, error
            self._next_piece(limit)
        return self.take(limit), None

    def _take_error(self) -> Exception | None:
        """Return the next error, once. After it, or after the last record, the file has `ended`."""
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
        """Discard the current piece; the next one begins at its end."""
        if self._piece is not None:
            self._begin, self._at = (self._piece.offset, self._piece.index), 0
            self._piece = None

    def state(self) -> list[int]:
        """Return the file number, the start of the current piece, the records handed out since, and the file size."""
        return [self.number, *self._begin, self._at + self._to_pass, self._size]

    def close(self) -> None:
        """Close the file."""
        self._here.close()
        if self._ahead is not None:
            self._ahead.close()
