"""Names of files (list_files), and the records of files: TFRecordDataset, TextLineDataset, from_tar, ...

Files are read in turn, in the order of interleave.
"""

from __future__ import annotations

import glob
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import numpy as np

from raydist.core.errors import InvalidArgumentError, NotFoundError, SpecError
from raydist.core.nest import LEAF
from raydist.core.values import AUTOTUNE, UNKNOWN_CARDINALITY
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError, Item, IteratorState
from raydist.pipelines.elements.spec import STR, TensorSpec
from raydist.pipelines.engine.op import DatasetOp, IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.producers import BorderIterator, read_item
from raydist.pipelines.formats.files import file_errors, local_path, path_text
from raydist.pipelines.formats.remote_file import open_system
from raydist.pipelines.ops.cycle import WHOLE, Cycle, Opener
from raydist.pipelines.ops.prefetch import Prefetcher, prefetcher
from raydist.pipelines.sources.file_format import RecordFormat
from raydist.pipelines.sources.memory import MemoryOp
from raydist.pipelines.sources.table_files import FileRows, ReadingStage


def list_files_op(pattern: Any) -> MemoryOp:
    """Return a source of the names that match now, sorted."""
    patterns = list(pattern) if isinstance(pattern, Sequence) and not isinstance(pattern, str | bytes) else [pattern]
    if not patterns:
        raise InvalidArgumentError(
            "list_files needs at least one pattern, got an empty list. Give a path, or a list of them."
        )
    found = sorted({name for one in patterns for name in matching_files(path_text(one))})
    if not found:
        raise NotFoundError(
            f"At least one file must match, but none matches {pattern!r}. Check the pattern (* ? [...]), and that this "
            "node sees the files."
        )
    return _names_in_memory(found, "list_files")


def _names_in_memory(names: Sequence[str], made_by: str) -> MemoryOp:
    column = np.array(names, dtype=object)
    return MemoryOp(Block(LEAF, (TensorSpec((), STR),), (column,), len(names)), made_by)


def matching_files(pattern: str) -> list[str]:
    """Return files and directories whose name matches `pattern`: local paths, or URIs of the pattern's scheme."""
    local = local_path(pattern)
    if local is not None:
        prefix = pattern.removesuffix(local)
        return [prefix + name for name in glob.glob(local)]
    with file_errors(pattern):
        try:
            system, inner = open_system(pattern)
        except ValueError as error:
            raise InvalidArgumentError(
                f"The scheme of a pattern must be one that fsspec knows, got {pattern!r}: {error}."
            ) from error
        return [system.unstrip_protocol(name) for name in system.glob(inner)]


def names_op(filenames: Any) -> DatasetOp:
    """Return the operation that yields the file names: `filenames` itself if it is one.

    Raises:
        SpecError: `filenames` is neither a path, a list of paths nor a dataset of str.
        InvalidArgumentError: The list is empty.
    """
    if isinstance(filenames, DatasetOp):
        return filenames
    if isinstance(filenames, np.ndarray):
        filenames = filenames.tolist()
    is_list = isinstance(filenames, Sequence) and not isinstance(filenames, str | bytes | os.PathLike)
    paths = list(filenames) if is_list else [filenames]
    if not paths:
        raise InvalidArgumentError("filenames must name at least one file, got an empty list. Check what made it.")
    return _names_in_memory([path_text(path) for path in paths], "filenames")


@dataclass(frozen=True, eq=False)
class RecordFilesOp(DatasetOp):
    """The records, as bytes, of the files that `names` yields."""

    names: DatasetOp  # an operation whose elements are file names
    format: RecordFormat  # format of the files
    takes_row_ids: ClassVar[bool] = True

    cycle_length: int = 1  # number of files that are read in turn, one record each
    ahead: bool = False  # True to prefetch each of them with a thread
    gives_rows = True

    @classmethod
    def of(cls, filenames: Any, record_format: RecordFormat, num_parallel_reads: int | None) -> RecordFilesOp:
        """Return the operation for the arguments that all readers share."""
        cycle = 1 if num_parallel_reads in (None, AUTOTUNE) else num_parallel_reads
        if not isinstance(cycle, int) or cycle < 1:
            raise InvalidArgumentError(
                f"num_parallel_reads must be >= 1, AUTOTUNE or None, got {num_parallel_reads!r}."
            )
        return cls(names_op(filenames), record_format, cycle, num_parallel_reads not in (None, 1))

    @property
    def inputs(self) -> tuple[DatasetOp, ...]:
        return (self.names,)

    @property
    def name(self) -> str:
        return self.format.name

    @property
    def label(self) -> str:
        return f"{self.name}({self.format.label}, files in turn: {self.cycle_length})"

    @property
    def order_settings(self) -> str:
        return f"files in turn: {self.cycle_length}"

    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY

    def element_spec(self) -> Any:
        return self.format.spec

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        names = replace(ctx, row_ids=False).build(self.names)
        name, meter = ctx.operation_names[id(self)], ctx.meter(self)
        prefetch = None
        if self.ahead:
            inside = ctx.meters.inside(name).shared
            prefetch = prefetcher(ctx, meter, name, threads=self.cycle_length, inside=inside)
        opener = _FileOpener(self, names, name, ReadingStage.of(self, self.format, ctx), prefetch)
        return BorderIterator(Cycle(opener, self.cycle_length, WHOLE if self.cycle_length == 1 else 1))


@final
@dataclass(frozen=True, slots=True)
class _OpenedFile:
    """A file that waits for its turn."""

    position: tuple[IteratorState, int]  # see `Opener.position`
    opened: OpIterator | ElementError
    start: Callable[[], object] = lambda: None  # begins to read, in a thread or on a worker

    def close(self) -> None:
        if not isinstance(self.opened, ElementError):
            self.opened.close()


@final
class _FileOpener(Opener):
    """An opener of files by name.

    If workers or threads read, some files are opened before their turns, and the first piece of each is read meanwhile.
    """

    def __init__(
        self,
        op: RecordFilesOp,
        names: OpIterator,
        name: str,
        workers: ReadingStage | None,
        prefetch: Prefetcher | None,
    ) -> None:
        super().__init__(names, name)
        self._op = op
        self._workers = workers
        self._prefetch = prefetch
        self._in_progress = op.cycle_length if prefetch else 1
        if workers is not None:
            self._in_progress = max(self._in_progress, workers.executor.window)
        self._has_names = True
        self._ahead: deque[_OpenedFile] = deque()

    def open_next(self) -> OpIterator | ElementError:
        is_restored = self.next_index < self.num_opened  # the file goes on at a saved position: it must not start yet
        in_turn = min(self.next_index, self._op.cycle_length)
        count = 1 if is_restored else max(1, self._in_progress - in_turn)
        while self._has_names and len(self._ahead) < count:
            position = self._source.state_dict(), self.next_index + len(self._ahead)
            try:
                self._ahead.append(self._opened(position, read_item(self._source, 1)))
            except StopIteration:
                self._has_names = False
        if not self._ahead:
            self.ended = True
            raise StopIteration
        self.next_index += 1
        opened = self._ahead.popleft().opened
        for file in self._ahead:
            file.start()
        return opened

    def _opened(self, position: tuple[IteratorState, int], name: Item) -> _OpenedFile:
        if isinstance(name, ElementError):
            return _OpenedFile(position, name)
        value = name.row(0)
        if not isinstance(value, str | bytes):
            message = f"A dataset of file names must have elements of str, got {value!r:.100}."
            return _OpenedFile(position, ElementError(SpecError(message)))
        rows = FileRows((path_text(value),), self._op.format, self._workers)
        source: OpIterator = BorderIterator(rows)
        if self._prefetch is None or rows.on_workers:
            return _OpenedFile(position, source, rows.start)
        source = self._prefetch(source)
        return _OpenedFile(position, source, source.has_ready)  # which starts the thread

    def position(self) -> tuple[IteratorState, int]:
        return self._ahead[0].position if self._ahead else (self._source.state_dict(), self.next_index)

    def skip_input(self) -> None:
        if not self._ahead:
            super().skip_input()
            return
        self._ahead.popleft().close()
        self.next_index += 1

    def close(self) -> None:
        for file in self._ahead:
            file.close()
        super().close()
