"""Reading one file in pieces, each with the position of its end: here, in a thread, or by workers.

A file without an index is read from the first piece to the last: each piece begins where the last one ended. Workers of
an executor read several files at a time, and this process gets row ids; the end of a piece comes back with them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from raydist.core.errors import DeadlineExceededError
from raydist.core.nest import flatten
from raydist.core.thread_shutdown import end_at_exit
from raydist.options import Timeouts
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.columns import Column, object_column
from raydist.pipelines.elements.items import ElementError, Item, count_items
from raydist.pipelines.elements.spec import STR, TensorSpec
from raydist.pipelines.engine.executor import Executor, Pending
from raydist.pipelines.engine.kernel import Kernel, StageSpec
from raydist.pipelines.engine.op import DatasetOp, IterContext
from raydist.pipelines.engine.op_iterator import MACHINERY_ERRORS
from raydist.pipelines.formats.records import RecordReader
from raydist.pipelines.sources.file_format import TableFormat, TableReader

_LEAST_BYTES, _MOST_BYTES = 4 << 20, 16 << 20  # of a piece: the first one is small, so that rows come early
_FIRST_ROWS = 64  # read before the size of a row is known
_MOST_ROWS = 1 << 16
_ASKED = (TensorSpec((), STR), TensorSpec((), np.int64), TensorSpec((None,), np.int64))  # path, bytes, position
_STRUCTURE = flatten(_ASKED)[1]
_THREAD_BYTES = 1 << 20
_THREAD_FIRST_RECORDS = 16  # in a piece, before the size of a record is known
_THREAD_MAX_RECORDS = 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """Some consecutive records."""

    records: Column  # records in order, as a column of bytes; may be empty
    error: Exception | None  # error that follows the records, if any
    offset: int  # position of the next piece in the file
    index: int  # number of the record at `offset`
    ended: bool  # True if no piece follows


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


class _PieceEnd(Exception):
    """Mark the end of a piece, behind its items: an error, because rows of another kind cannot follow the rows."""

    def __init__(self, position: Sequence[int], ended: bool) -> None:
        super().__init__(tuple(position), ended)
        self.position = position
        self.ended = ended


@dataclass(frozen=True, eq=False)
class _ReadPiece(Kernel):
    """Reads a piece of a file: its rows and errors, and a :class:`_PieceEnd`."""

    preserves_count: ClassVar[bool] = False
    format: TableFormat
    label: str
    uses_index = False

    def run(self, block: Block, start: int) -> Sequence[Item]:
        path, wanted, position = block.row(0)
        try:
            reader = self.format.open(path, position.tolist())
        except Exception as failure:  # such as a missing file or a directory
            return [ElementError(failure), ElementError(_PieceEnd((), ended=True))]
        with closing(reader):
            items = _items_of(reader, int(wanted))
            return [*items, ElementError(_PieceEnd(reader.position(), reader.ended))]


def _items_of(reader: TableReader, wanted: int) -> list[Item]:
    """Return the next rows, of about `wanted` bytes, up to the first error."""
    items: list[Item] = []
    num_rows = num_bytes = 0
    while not reader.ended and num_bytes < wanted and num_rows < _MOST_ROWS:
        mean = max(1, num_bytes // num_rows if num_rows else wanted // _FIRST_ROWS)
        found = reader.read(max(1, min((wanted - num_bytes) // mean, _MOST_ROWS)))
        items += found
        num_rows += count_items(found)
        num_bytes += sum(item.num_bytes for item in found if isinstance(item, Block))
        if any(isinstance(item, ElementError) for item in found):
            break
    return items


class ReadingStage:
    """The reading of the files of one format by an executor.

    Args:
        executor: Runs the work.
        file_format: Format of the files.
        name: Name of the operation and its epoch, unique in the iteration.
    """

    def __init__(self, executor: Executor, file_format: TableFormat, name: str) -> None:
        self.executor = executor
        self._spec = StageSpec(f"{name}-reading", (_ReadPiece(file_format, name),))
        self._format = file_format

    @classmethod
    def of(cls, op: DatasetOp, file_format: TableFormat, ctx: IterContext) -> ReadingStage | None:
        """Return the stage that reads the files of an operation; None if this process reads them."""
        if ctx.readers is None:
            return None
        return cls(ctx.readers, file_format, f"{ctx.operation_names[id(op)]}@{'.'.join(map(str, ctx.epoch))}")

    def suits(self, path: str) -> bool:
        """Return True if a file can be read from any piece on."""
        return self._format.starts_anywhere(path)

    def read(self, path: str, position: Sequence[int], num_bytes: int) -> Pending:
        """Start to read the piece of about `num_bytes` that begins at `position`."""
        columns = (object_column([path]), np.array([num_bytes]), np.array([position], np.int64))
        return self.executor.submit(self._spec, Block(_STRUCTURE, _ASKED, columns, 1), (0,))


class PiecesOnWorkers(TableReader):
    """A reader of the pieces of a file, one of which is read ahead.

    Args:
        stage: Reads pieces.
        path: Path of the file.
        position: Beginning of the first piece; empty for that of the file.
    """

    def __init__(self, stage: ReadingStage, path: str, position: Sequence[int]) -> None:
        self.ended = False
        self._stage = stage
        self._path = path
        self._next = list(position)
        self._num_bytes = _LEAST_BYTES
        self._coming: Pending | None = None

    def start(self) -> None:
        """Start to read the next piece. May be called again."""
        if self._coming is None:
            self._coming = self._stage.read(self._path, self._next, self._num_bytes)
            self._num_bytes = min(self._num_bytes * 2, _MOST_BYTES)

    def position(self) -> list[int]:
        return self._next

    def read(self, limit: int) -> list[Item]:
        """Return the next piece. Blocks until it is read; must not be called after a piece that ended."""
        self.start()
        coming, self._coming = self._coming, None
        if coming is None:
            raise AssertionError("raydist bug: no piece was asked for.")
        try:
            items = coming.result().items
        except MACHINERY_ERRORS:
            raise
        except Exception as error:  # such as a format that workers cannot load
            self.ended = True
            return [ElementError(error)]
        last = items[-1].error if isinstance(items[-1], ElementError) else None
        if not isinstance(last, _PieceEnd):
            raise AssertionError(f"raydist bug: a piece of {self._path!r} has no end, but {last!r}.")
        self._next, self.ended = list(last.position), last.ended
        if not self.ended:
            self.start()
        return list(items[:-1])

    def close(self) -> None:
        """Drop the piece that was read ahead."""
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.cancel()


class _Reading(threading.Thread):
    """A thread that reads one piece."""

    def __init__(self, reader: PieceReader, limit: int) -> None:
        super().__init__(name="raydist-read", daemon=True)
        self._reader = reader
        self._limit = limit
        self.piece: Piece | None = None
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self.piece = self._reader.read(self._limit)
        except BaseException as failure:  # a thread that ends silently would look like a file without an end
            self.failure = failure


class PiecesAhead:
    """A reader of the pieces of a file, the next of which is read by a thread meanwhile."""

    def __init__(self, open_reader: Callable[[], RecordReader], path: str) -> None:
        self._path = path
        self._reader = PieceReader(open_reader)
        self._limit = _THREAD_FIRST_RECORDS
        self._coming: _Reading | None = None
        self._limits = Timeouts()

    def start(self) -> None:
        """Start to read the next piece. May be called again."""
        self._started()

    def _started(self) -> _Reading:
        if self._coming is None:
            self._coming = _Reading(self._reader, self._limit)
            end_at_exit(self._coming, lambda: None)
            self._coming.start()
        return self._coming

    def read(self) -> Piece:
        """Return the next piece. Blocks up to `Timeouts.input_s`; must not be called after a piece that ended."""
        coming = self._started()
        coming.join(self._limits.input_s)
        if coming.is_alive():
            raise DeadlineExceededError(
                f"The next records of {self._path!r} must be read within {self._limits.input_s} s, and were not. "
                "Its file system does not answer."
            )
        if coming.piece is None:
            raise coming.failure or AssertionError("raydist bug: a thread ended without a piece and without an error.")
        self._coming = None
        records = coming.piece.records
        if len(records):
            mean = sum(map(len, records)) // len(records)
            self._limit = max(1, min(_THREAD_MAX_RECORDS, _THREAD_BYTES // max(1, mean)))
        if not coming.piece.ended:
            self._started()
        return coming.piece

    def close(self) -> None:
        """Close the file, once the piece that was read ahead is there. May be called twice."""
        if self._coming is not None:
            self._coming.join(self._limits.close_s)
            if self._coming.is_alive():
                return  # the file closes itself when the thread ends
        self._reader.close()
