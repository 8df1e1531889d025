"""Datasets of the rows of table files: file after file, or in pieces, several at a time.

An input worker reads a piece of a file and returns its rows and the position of its end. A file without an index is
read from the first piece to the last: each piece begins where the previous one ended. If a format has an index of its
parts, a source hands out descriptions of pieces, and a stage reads them, wherever stages run.
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import closing
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.core.nest import flatten
from raydist.pipelines.elements.blocks import Block, object_column
from raydist.pipelines.elements.items import ElementError, Item, IteratorState, count_items
from raydist.pipelines.elements.spec import STR, TensorSpec
from raydist.pipelines.engine.kernel import Kernel, StageSpec
from raydist.pipelines.engine.op_iterator import MACHINERY_ERRORS, OpIterator
from raydist.pipelines.engine.op_kinds import ElementwiseOp, SourceOp
from raydist.pipelines.engine.producers import BorderIterator, ResumableProducer
from raydist.pipelines.engine.random_access import RandomAccess
from raydist.pipelines.formats.files import local_size, path_text, require_same_size
from raydist.pipelines.sources.file_format import FileSplit, SplitFormat, TableFormat, TableReader
from raydist.pipelines.sources.memory import IndexedIterator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from raydist.pipelines.engine.executor import Executor, Pending
    from raydist.pipelines.engine.op import DatasetOp, IterContext

_LEAST_BYTES, _MOST_BYTES = 4 << 20, 16 << 20  # of a piece: the first one is small, so that rows come early
_FIRST_ROWS = 64  # read before the size of a row is known
_MOST_ROWS = 1 << 16
_INT64 = TensorSpec((), np.int64)
_ASKED = (TensorSpec((), STR), _INT64, TensorSpec((None,), np.int64))  # path, bytes, position
_ASKED_STRUCTURE = flatten(_ASKED)[1]
_SPLIT = (TensorSpec((), STR), _INT64, _INT64, _INT64)  # the fields of a FileSplit
_SPLIT_STRUCTURE = flatten(_SPLIT)[1]


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
        return self.executor.submit(self._spec, Block(_ASKED_STRUCTURE, _ASKED, columns, 1), (0,))


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


def table_paths(paths: Any, reader: str) -> tuple[str, ...]:
    """Return one path or several, as text. `reader` is the name of the caller, for messages."""
    several = not isinstance(paths, str | bytes | os.PathLike) and hasattr(paths, "__iter__")
    names = tuple(path_text(path) for path in (paths if several else [paths]))
    if not names:
        raise InvalidArgumentError(f"{reader} needs at least one path, got an empty list.")
    return names


def shown_paths(paths: Sequence[str]) -> str:
    """Describe files in few words; an empty text for a dataset that was saved without elements.

    >>> shown_paths(["a", "b", "c"])
    "'a' and 2 more"
    """
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"{paths[0]!r}{more}" if paths else ""


@dataclass(frozen=True, eq=False)
class TableFilesOp(SourceOp):
    """The rows of files."""

    paths: tuple[str, ...]  # the files, in order
    format: TableFormat  # format of the files
    num_rows: int  # number of rows in all files, or UNKNOWN_CARDINALITY
    takes_row_ids: ClassVar[bool] = True
    gives_rows = True

    @property
    def name(self) -> str:
        return self.format.name

    @property
    def label(self) -> str:
        return f"{self.name}({', '.join(filter(None, (shown_paths(self.paths), self.format.label)))})"

    def cardinality(self) -> int:
        return self.num_rows

    def element_spec(self) -> Any:
        return self.format.spec

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return BorderIterator(FileRows(self.paths, self.format, ReadingStage.of(self, self.format, ctx)))

    def iterator(self) -> OpIterator:
        """Return an iterator that reads the files in this process."""
        return BorderIterator(FileRows(self.paths, self.format))


class FileRows(ResumableProducer):
    """The rows of one file after the other. Position: the number of the file, the reader's position, the size."""

    def __init__(self, paths: Sequence[str], table_format: TableFormat, workers: ReadingStage | None = None) -> None:
        self._paths = paths
        self._format = table_format
        self._workers = workers if workers is not None and all(map(workers.suits, paths)) else None
        self._coming: deque[PiecesOnWorkers] = deque()  # the next files, one piece of each is read ahead
        self._number = 0
        self._start: Sequence[int] = ()
        self._size = 0  # of the current file
        self._reader: TableReader | None = None

    @property
    def on_workers(self) -> bool:
        """True if workers read the files."""
        return self._workers is not None

    def make(self, limit: int) -> Sequence[Item]:
        if self._number == len(self._paths):
            raise StopIteration
        return self._read(limit)

    def _read(self, limit: int) -> list[Item]:
        if self._reader is None:
            path = self._paths[self._number]
            try:
                self._reader = self._open(path)
            except Exception as error:  # such as a missing file or a directory
                self._next_file()
                return [ElementError(error)]
        items = self._reader.read(limit)
        if self._reader.ended:
            self._next_file()
        return items

    def _open(self, path: str) -> TableReader:
        if self._workers is None:
            return self._format.open(path, self._start)
        self.start()
        return self._coming.popleft()

    def start(self) -> None:
        """Let workers begin with the current file and the files after it."""
        while self._workers is not None and len(self._coming) < self._num_coming(self._workers):
            number = self._number + len(self._coming)
            start = self._start if number == self._number else ()
            self._coming.append(PiecesOnWorkers(self._workers, self._paths[number], start))
            self._coming[-1].start()

    def _num_coming(self, workers: ReadingStage) -> int:
        return min(workers.executor.window, len(self._paths) - self._number)

    def _next_file(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = None
        self._number += 1
        self._start = ()
        self._size = 0

    def border(self) -> IteratorState:
        at = list(self._start if self._reader is None else self._reader.position())
        if not self._size and self._number < len(self._paths):
            self._size = local_size(self._paths[self._number])
        return {"file": self._number, "at": at, "size": self._size}

    def restore(self, border: IteratorState) -> None:
        self.close()
        self._reader = None
        self._coming.clear()
        self._number, self._start = int(border["file"]), [int(number) for number in border["at"]]
        self._size = int(border.get("size", 0))  # earlier versions did not save it
        if self._number > len(self._paths):
            raise FailedPreconditionError(
                f"A state must be loaded into the pipeline that it was saved from, but it is of file {self._number}, "
                f"and {self._format.name} has {len(self._paths)} files."
            )
        if self._number < len(self._paths):
            require_same_size(self._paths[self._number], self._size)

    def close(self) -> None:
        for reader in (self._reader, *self._coming):
            if reader is not None:
                reader.close()


@dataclass(frozen=True, eq=False)
class FileSplitsOp(SourceOp):
    """Descriptions of the pieces of files, in order."""

    splits: tuple[FileSplit, ...]
    name = "splits"

    @property
    def label(self) -> str:
        return f"{len(self.splits)} pieces of files"

    def cardinality(self) -> int:
        return len(self.splits)

    def element_spec(self) -> Any:
        return _SPLIT

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return _SplitIterator(_SplitAccess(self.splits), at_once=1)  # a piece is enough work for a worker


class _SplitIterator(IndexedIterator):
    def load_state_dict(self, state: IteratorState) -> None:
        super().load_state_dict(state)
        if self._next > len(self._access):
            raise FailedPreconditionError(
                f"A state must be loaded into the pipeline that it was saved from, but it was taken behind piece "
                f"{self._next} of the files, and they have {len(self._access)} now."
            )


@dataclass(frozen=True, eq=False)
class _SplitAccess(RandomAccess):
    splits: tuple[FileSplit, ...]

    def __len__(self) -> int:
        return len(self.splits)

    def gather(self, indices: Any) -> Block:
        paths, *numbers = zip(*(astuple(self.splits[index]) for index in indices), strict=True)
        columns = (object_column(paths), *map(np.array, numbers))
        return Block(_SPLIT_STRUCTURE, _SPLIT, columns, len(indices))


@dataclass(frozen=True, eq=False)
class SplitFilesOp(ElementwiseOp):
    """The rows of the pieces that `splits` describes."""

    splits: DatasetOp  # its elements are descriptions of pieces
    format: SplitFormat
    num_rows: int  # in all files, or UNKNOWN_CARDINALITY
    shown: str  # the files, for `explain()`
    # All files, including files without a piece.
    paths: tuple[str, ...] = field(default=(), metadata={"fingerprint": False})
    gives_rows = True

    @property
    def inputs(self) -> tuple[DatasetOp, ...]:
        return (self.splits,)

    @property
    def name(self) -> str:
        return self.format.name

    @property
    def label(self) -> str:
        return f"{self.name}({', '.join(filter(None, (self.shown, self.format.label)))})"

    def cardinality(self) -> int:
        return self.num_rows

    def element_spec(self) -> Any:
        return self.format.spec

    def every(self, step: int, first: int) -> SplitFilesOp:
        """Return the operation for the files first, first + step, ..."""
        if not isinstance(self.splits, FileSplitsOp):
            raise FailedPreconditionError(f"raydist bug: {self.label} must know its pieces, got {self.splits.label}.")
        of_files = _by_file(self.splits.splits, self.paths)[first::step]
        kept = tuple(split for of_file in of_files for split in of_file)
        num_rows = self.num_rows if self.num_rows < 0 else sum(split.num_rows for split in kept)
        return replace(self, splits=FileSplitsOp(kept), num_rows=num_rows, paths=self.paths[first::step])

    def kernel(self, ctx: IterContext) -> Kernel:
        return _ReadKernel(self.format, ctx.operation_names[id(self)])


def _by_file(splits: Sequence[FileSplit], paths: Sequence[str]) -> list[list[FileSplit]]:
    """Return the pieces of each file; a file that is named twice has them twice."""
    rest = deque(splits)
    found: list[list[FileSplit]] = []
    for path in paths:
        found.append([])
        while rest and (rest[0].path, rest[0].first) == (path, found[-1][-1].end if found[-1] else 0):
            found[-1].append(rest.popleft())
    return found


@dataclass(frozen=True, eq=False)
class _ReadKernel(Kernel):
    preserves_count: ClassVar[bool] = False
    multiplies: ClassVar[bool] = True
    format: SplitFormat
    label: str
    uses_index = False

    def run(self, block: Block, start: int) -> Sequence[Item]:
        return [item for row in block.rows() for item in self._read(FileSplit(row[0], *map(int, row[1:])))]

    def _read(self, split: FileSplit) -> list[Item]:
        try:
            return self.format.read_split(split)
        except Exception as error:  # such as a file that was deleted
            return [ElementError(error)]
