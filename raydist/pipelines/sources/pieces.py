"""Reading the records of one file in pieces, each with the position of its end: here, in a thread, or by workers.

A file of records has no index, so each piece begins where the last one ended. Workers of an executor read several files
at a time, and this process gets row ids of the records; the end of a piece comes back with them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from raydist.ending_threads import end_at_exit
from raydist.errors import DeadlineExceededError
from raydist.nest import flatten
from raydist.options import Timeouts
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.columns import Column, concat_columns, in_memory, object_column
from raydist.pipelines.elements.items import ElementError, Item
from raydist.pipelines.elements.spec import BYTES, STR, TensorSpec
from raydist.pipelines.engine.executor import Executor, Pending
from raydist.pipelines.engine.kernel import Kernel, StageSpec
from raydist.pipelines.engine.op_iterator import MACHINERY_ERRORS
from raydist.pipelines.formats.records import RecordReader
from raydist.pipelines.sources.file_format import RecordFormat

__all__ = ["Piece", "PieceReader", "PiecesAhead", "PiecesOnWorkers", "ReadingStage"]

_LEAST_BYTES, _MOST_BYTES = 4 << 20, 16 << 20  # of a piece: small at the beginning of a file, for early records
_FIRST_RECORDS = 64  # read before the size of a record is known
_MOST_RECORDS = 1 << 16
_INT64 = TensorSpec((), np.int64)
_ASKED = (TensorSpec((), STR), _INT64, _INT64)  # path, offset, index of the record there
# A record; in the last row b"", the offset of the end or -1, and the index there.
_READ = (TensorSpec((), BYTES), _INT64, _INT64)
_NESTS = (flatten(_ASKED)[1], flatten(_READ)[1])
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


@dataclass(frozen=True, eq=False)
class _ReadPiece(Kernel):
    """Reads a piece of a file: the records, an error behind them if there is one, and the position of the end."""

    preserves_count: ClassVar[bool] = False
    format: RecordFormat
    label: str
    uses_index = False

    def run(self, block: Block, start: int) -> Sequence[Item]:
        path, offset, index = block.row(0)
        reader = PieceReader(lambda: self.format.open(path, int(offset), int(index)))
        records: list[Column] = []
        num_records = num_bytes = 0
        wanted = max(_LEAST_BYTES, min(int(offset), _MOST_BYTES))
        try:
            while True:
                mean = num_bytes // num_records if num_records else wanted // _FIRST_RECORDS
                piece = reader.read(max(1, min((wanted - num_bytes) // max(1, mean), _MOST_RECORDS)))
                records.append(piece.records)
                num_records += len(piece.records)
                num_bytes += sum(map(len, piece.records))
                if piece.ended or piece.error is not None or num_bytes >= wanted or num_records >= _MOST_RECORDS:
                    break
        finally:
            reader.close()
        zeros = np.zeros(num_records, np.int64)
        items: list[Item] = [_rows_read(np.concatenate(records), zeros, zeros)] if num_records else []
        if piece.error is not None:
            items.append(ElementError(piece.error))
        end = -1 if piece.ended else piece.offset
        return [*items, _rows_read(object_column([b""]), np.array([end]), np.array([piece.index]))]


def _rows_read(records: Column, offsets: Column, indices: Column) -> Block:
    return Block(_NESTS[1], _READ, (records, offsets, indices), len(records))


class ReadingStage:
    """The reading of the files of one format by an executor.

    Args:
        executor: Runs the work.
        record_format: Format of the files.
        name: Name of the operation and its epoch, unique in the iteration.
    """

    def __init__(self, executor: Executor, record_format: RecordFormat, name: str) -> None:
        self.executor = executor
        self._spec = StageSpec(f"{name}-reading", (_ReadPiece(record_format, name),))
        self._format = record_format

    def suits(self, path: str) -> bool:
        """Return True if a file can be read from any piece on: one that is not compressed."""
        return self._format.compression_of(path) is None

    def read(self, path: str, offset: int, index: int) -> Pending:
        """Start to read the piece that begins at `offset` with record `index`."""
        columns = (object_column([path]), np.array([offset]), np.array([index]))
        return self.executor.submit(self._spec, Block(_NESTS[0], _ASKED, columns, 1), (0,))


class PiecesOnWorkers:
    """A reader of the pieces of a file, one of which is read ahead.

    Args:
        stage: Reads pieces.
        path: Path of the file.
        offset: Where the first piece begins.
        index: Number of the record there.
    """

    def __init__(self, stage: ReadingStage, path: str, offset: int, index: int) -> None:
        self._stage = stage
        self._path = path
        self._next = offset, index
        self._coming: Pending | None = None

    def start(self) -> None:
        """Start to read the next piece. May be called again."""
        if self._coming is None:
            self._coming = self._stage.read(self._path, *self._next)

    def read(self) -> Piece:
        """Return the next piece. Blocks until it is read; must not be called after a piece that ended."""
        self.start()
        coming, self._coming = self._coming, None
        if coming is None:
            raise AssertionError("raydist bug: no piece was asked for.")
        try:
            piece = _piece_of(coming.result().items)
        except MACHINERY_ERRORS:
            raise
        except Exception as error:  # such as a format that workers cannot load
            return Piece(object_column([]), error, 0, 0, ended=True)
        self._next = piece.offset, piece.index
        if not piece.ended:
            self.start()
        return piece

    def close(self) -> None:
        """Drop the piece that was read ahead."""
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.cancel()


def _piece_of(items: Sequence[Item]) -> Piece:
    error = next((item.error for item in items if isinstance(item, ElementError)), None)
    blocks = [item for item in items if isinstance(item, Block)]
    records = concat_columns([block.columns[0] for block in blocks], np.concatenate)[:-1]
    offset, index = (int(in_memory(blocks[-1].columns[place][-1:])[0]) for place in (1, 2))
    return Piece(records, error, max(offset, 0), index, ended=offset < 0)


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
