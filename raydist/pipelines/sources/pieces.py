"""Reading one file in pieces by workers, each with the position of its end.

A file without an index is read from the first piece to the last: each piece begins where the last one ended. Workers of
an executor read several files at a time, and this process gets row ids; the end of a piece comes back with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from raydist.core.nest import flatten
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.columns import object_column
from raydist.pipelines.elements.items import ElementError, Item, count_items
from raydist.pipelines.elements.spec import STR, TensorSpec
from raydist.pipelines.engine.executor import Executor, Pending
from raydist.pipelines.engine.kernel import Kernel, StageSpec
from raydist.pipelines.engine.op import DatasetOp, IterContext
from raydist.pipelines.engine.op_iterator import MACHINERY_ERRORS
from raydist.pipelines.sources.file_format import TableFormat, TableReader

_LEAST_BYTES, _MOST_BYTES = 4 << 20, 16 << 20  # of a piece: the first one is small, so that rows come early
_FIRST_ROWS = 64  # read before the size of a row is known
_MOST_ROWS = 1 << 16
_ASKED = (TensorSpec((), STR), TensorSpec((), np.int64), TensorSpec((None,), np.int64))  # path, bytes, position
_STRUCTURE = flatten(_ASKED)[1]


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
