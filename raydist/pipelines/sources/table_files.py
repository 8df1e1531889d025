"""Datasets of the rows of table files: file after file, or in pieces, several at a time.

For pieces, a source hands out descriptions, and a stage reads them. So pieces are read wherever stages run (in this
thread, on threads, by input workers), and their rows come in order.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.core.nest import flatten
from raydist.pipelines.elements.blocks import Block, object_column
from raydist.pipelines.elements.items import ElementError, Item, IteratorState
from raydist.pipelines.elements.spec import STR, TensorSpec
from raydist.pipelines.engine.kernel import Kernel
from raydist.pipelines.engine.op import DatasetOp, IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import ElementwiseOp, SourceOp
from raydist.pipelines.engine.producers import BorderIterator, ResumableProducer
from raydist.pipelines.engine.random_access import RandomAccess
from raydist.pipelines.formats.files import path_text
from raydist.pipelines.formats.opening import local_size, require_same_size
from raydist.pipelines.sources.file_format import FileSplit, SplitFormat, TableFormat, TableReader
from raydist.pipelines.sources.memory import IndexedIterator
from raydist.pipelines.sources.pieces import PiecesOnWorkers, ReadingStage

_INT64 = TensorSpec((), np.int64)
_SPECS = (TensorSpec((), STR), _INT64, _INT64, _INT64)
_STRUCTURE = flatten(_SPECS)[1]


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
        return _SPECS

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
        return Block(_STRUCTURE, _SPECS, columns, len(indices))


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
