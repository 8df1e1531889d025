"""Reading a file in a thread of its own, some pieces ahead of whoever wants its records."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import final

from raydist.ending_threads import end_at_exit
from raydist.errors import DeadlineExceededError
from raydist.options import Timeouts
from raydist.pipelines.sources.file_format import RecordReader
from raydist.pipelines.sources.pieces import Piece, PieceReader

__all__ = ["PiecesAhead"]

_PIECES = 2  # held ready: one is handed out while the next is read
_PIECE_BYTES = 1 << 20
_FIRST_RECORDS = 16  # of a piece, before their size is known
_MAX_RECORDS = 1024


@final
class _Shelf:
    """What the two threads share. The reading thread opens the file and closes it."""

    def __init__(self, open_reader: Callable[[], RecordReader]) -> None:
        self.open_reader = open_reader
        self.changed = threading.Condition()
        self.pieces: deque[Piece] = deque()
        self.failure: BaseException | None = None
        self.stopped = False

    def wait_for_room(self) -> bool:
        """Whether another piece is wanted; waits until it is or nothing is wanted any more."""
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
    """The reading thread. It knows the shelf only, so that an abandoned reader is collected and stops it."""
    reader = PieceReader(shelf.open_reader)
    limit = _FIRST_RECORDS
    try:
        while shelf.wait_for_room():
            piece = reader.read(limit)
            shelf.put(piece)
            if piece.ended:
                break
            if piece.records:
                mean = sum(map(len, piece.records)) // len(piece.records)
                limit = max(1, min(_MAX_RECORDS, _PIECE_BYTES // max(1, mean)))
    except BaseException as failure:  # a thread that died silently would look like a file without an end
        shelf.fail(failure)
    finally:
        reader.close()


@final
class PiecesAhead:
    """Hands out the pieces of a file; its thread begins with the first call of `start` or `read`."""

    def __init__(self, open_reader: Callable[[], RecordReader], path: str) -> None:
        self._path = path
        self._shelf = _Shelf(open_reader)
        self._thread: threading.Thread | None = None
        self._limits = Timeouts()
        self._finalizer = weakref.finalize(self, self._shelf.stop)

    def start(self) -> None:
        """Begin to read."""
        if self._thread is None:
            self._thread = threading.Thread(target=_read, args=(self._shelf,), name="raydist-read", daemon=True)
            end_at_exit(self._thread, self._finalizer)
            self._thread.start()

    def read(self) -> Piece:
        """The next piece; the last one says so. Waits for it, up to the limit of `Timeouts.input_s`."""
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
