"""Reading the records of files by the workers of an executor: this process gets row ids of them.

A file of records has no index, so each piece begins where the last one ended: its end comes back with the records.
Several files are read at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from raydist.nest import flatten
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.columns import Column, concat_columns, in_memory, object_column
from raydist.pipelines.elements.items import ElementError, Item
from raydist.pipelines.elements.spec import BYTES, STR, TensorSpec
from raydist.pipelines.engine.executor import Executor, Pending
from raydist.pipelines.engine.kernel import Kernel, StageSpec
from raydist.pipelines.engine.op_iterator import MACHINERY_ERRORS
from raydist.pipelines.sources.file_format import RecordFormat
from raydist.pipelines.sources.pieces import Piece, PieceReader

__all__ = ["PiecesOnWorkers", "ReadingStage"]

_PIECE_BYTES = 4 << 20
_FIRST_RECORDS = 64  # read before the size of a record is known
_MOST_RECORDS = 1 << 16

_INT64 = TensorSpec((), np.int64)
_ASKED = (TensorSpec((), STR), _INT64, _INT64)  # path, offset, index of the record there
# A record; in the last row b"", the offset of the end or -1, and the index there.
_READ = (TensorSpec((), BYTES), _INT64, _INT64)
_NESTS = (flatten(_ASKED)[1], flatten(_READ)[1])


@final
@dataclass(frozen=True, eq=False)
class _ReadPiece(Kernel):
    """Reads a piece of a file: the records, an error behind them if there is one, and the position of the end."""

    preserves_count: ClassVar[bool] = False
    format: RecordFormat
    label: str

    @property
    def uses_index(self) -> bool:
        return False

    def run(self, block: Block, start: int) -> Sequence[Item]:
        path, offset, index = block.row(0)
        reader = PieceReader(lambda: self.format.open(path, int(offset), int(index)))
        records: list[Column] = []
        num_records = num_bytes = 0
        try:
            while True:
                mean = num_bytes // num_records if num_records else _PIECE_BYTES // _FIRST_RECORDS
                piece = reader.read(max(1, min((_PIECE_BYTES - num_bytes) // max(1, mean), _MOST_RECORDS)))
                records.append(piece.records)
                num_records += len(piece.records)
                num_bytes += sum(map(len, piece.records))
                if piece.ended or piece.error is not None or num_bytes >= _PIECE_BYTES or num_records >= _MOST_RECORDS:
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


@final
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


@final
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
