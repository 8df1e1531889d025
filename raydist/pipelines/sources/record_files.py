"""Datasets of the records of files, which are read one after the other or in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import numpy as np

from raydist.errors import FailedPreconditionError, InvalidArgumentError, SpecError
from raydist.nest import LEAF
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.columns import Column, RemoteColumn, columns_in_turn, concat_columns, object_column
from raydist.pipelines.elements.items import ElementError, Item, IteratorState
from raydist.pipelines.elements.saved_state import counts_in
from raydist.pipelines.elements.spec import STR, TensorSpec
from raydist.pipelines.engine.op import DatasetOp, IterContext
from raydist.pipelines.engine.op_iterator import MACHINERY_ERRORS, OpIterator
from raydist.pipelines.engine.resume import Outbox, read_items
from raydist.pipelines.formats.files import path_text
from raydist.pipelines.formats.tfrecord import BLOCK_BYTES, FRAME_BYTES
from raydist.pipelines.sources.file_format import RecordFormat
from raydist.pipelines.sources.file_sizes import require_same_size
from raydist.pipelines.sources.memory import MemoryOp
from raydist.pipelines.sources.pieces_on_workers import ReadingStage
from raydist.pipelines.sources.record_slot import RecordSlot
from raydist.values import AUTOTUNE, UNKNOWN_CARDINALITY

__all__ = ["FileNames", "RecordFilesOp", "names_op"]


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
    paths = (
        list(filenames) if isinstance(filenames, Sequence) and not isinstance(filenames, str | bytes) else [filenames]
    )
    if not paths:
        raise InvalidArgumentError("filenames must name at least one file, got an empty list. Check what made it.")
    column = np.array([path_text(path) for path in paths], dtype=object)
    return MemoryOp(Block(LEAF, (TensorSpec((), STR),), (column,), len(paths)), "filenames")


@final
class FileNames:
    """A reader of file names, one at a time.

    Attributes:
        num_taken: Number of names (and errors in place of names) so far.
    """

    def __init__(self, names: OpIterator) -> None:
        self.num_taken = 0
        self._names = names

    def take(self) -> str:
        """Return the next name.

        Raises:
            StopIteration: No name is left.
            Exception: The error of the dataset of names at this place.
        """
        try:
            block = self._names.next_block(1)
        except StopIteration:
            raise
        except Exception:
            self.num_taken += 1
            raise
        self.num_taken += 1
        value = block.row(0)
        if not isinstance(value, str | bytes):
            raise SpecError(f"A dataset of file names must have elements of str, got {value!r:.100}.")
        return path_text(value)

    def retake(self, num_taken: int, wanted: Sequence[int]) -> dict[int, str | ElementError]:
        """Take `num_taken` names again from a new dataset; return the names (or errors) with `wanted` numbers."""
        found: dict[int, str | ElementError] = {}
        for item in read_items(self._names, num_taken):
            size = item.num_rows if isinstance(item, Block) else 1
            for number in wanted:
                if self.num_taken <= number < self.num_taken + size:
                    row = number - self.num_taken
                    found[number] = path_text(item.row(row)) if isinstance(item, Block) else item
            self.num_taken += size
        return found

    def close(self) -> None:
        """Close the dataset of names."""
        self._names.close()


_SLOT_NUMBERS = 5  # in the state of a slot: file number, start offset, start record, records to skip, file size


@final
@dataclass(frozen=True, eq=False)
class RecordFilesOp(DatasetOp):
    """The records, as bytes, of the files that `names` yields.

    Attributes:
        names: An operation whose elements are file names.
        format: Format of the files.
        cycle_length: Number of files that are read in turn, one record each.
        ahead: True to prefetch each of them with a thread.
    """

    names: DatasetOp
    format: RecordFormat
    takes_row_ids: ClassVar[bool] = True

    cycle_length: int = 1
    ahead: bool = False

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
    def gives_rows(self) -> bool:
        return True

    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY

    def element_spec(self) -> Any:
        return self.format.spec

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        names = FileNames(replace(ctx, row_ids=False).build(self.names))
        workers = None
        if ctx.readers is not None:
            name = f"{ctx.operation_names[id(self)]}@{'.'.join(map(str, ctx.epoch))}"
            workers = ReadingStage(ctx.readers, self.format, name)
        return RecordFilesIterator(self, names, workers)


@final
class RecordFilesIterator(OpIterator):
    """An iterator that reads `cycle_length` files in turn.

    A slot whose file has ended takes the next file at once, and reads it from its next turn on: the order of
    interleave. The state has, for each slot, the number of its file and the position of its current piece.
    """

    def __init__(self, op: RecordFilesOp, names: FileNames, workers: ReadingStage | None = None) -> None:
        self._op = op
        self._names = names
        self._workers = workers
        self._coming: deque[RecordSlot | None] = deque()  # files that workers read ahead; None for no more files
        self._slots: list[RecordSlot | None] = []
        self._turn = 0
        self._outbox: Outbox | None = None

    def next_block(self, limit: int) -> Block:
        outbox = self._open_outbox()
        while not outbox:
            items = self._take_turns(limit)
            if not items:
                raise StopIteration
            outbox.put(items, self._position())
        return outbox.take(limit)

    def _open_outbox(self) -> Outbox:
        if self._outbox is None:
            self._outbox = Outbox(self._position())
        return self._outbox

    def _take_turns(self, limit: int) -> list[Item]:
        """Return up to `limit` records, and the error after them if there is one; an empty list at the end."""
        if not self._slots:
            self._slots = [self._next_file() for _ in range(self._op.cycle_length)]
        for slot in self._slots:
            if slot is not None:
                slot.start()
        self._look_ahead()
        records: list[Column] = []
        num_records = num_bytes = 0
        while num_records < limit and num_bytes < BLOCK_BYTES and any(self._slots):
            found = self._whole_rounds(limit - num_records)
            error = None
            if not len(found):
                found, error = self._take_turn(limit - num_records)
            records.append(found)
            num_records += len(found)
            num_bytes += _bytes_of(found)
            if error is not None:
                return [*self._blocks(records), ElementError(error)]
        return self._blocks(records)

    def _blocks(self, records: list[Column]) -> list[Item]:
        records = [column for column in records if len(column)]
        if not records:
            return []
        column = concat_columns(records, np.concatenate)
        return [Block(LEAF, (self._op.format.spec,), (column,), len(column))]

    def _whole_rounds(self, limit: int) -> Column:
        """Return the records of some rounds of all slots, as far as they were read."""
        in_turn = [slot for slot in (*self._slots[self._turn :], *self._slots[: self._turn]) if slot is not None]
        rounds = 0
        if len(self._slots) > 1 and in_turn:
            rounds = min(limit // len(in_turn), *(slot.ready() for slot in in_turn))
        if rounds == 0:
            return object_column([])
        return columns_in_turn([slot.take(rounds) for slot in in_turn], 1)

    def _take_turn(self, limit: int) -> tuple[Column, Exception | None]:
        """Return records of the current slot and the error after them, and pass the turn on."""
        turn, self._turn = self._turn, (self._turn + 1) % len(self._slots)
        slot = self._slots[turn]
        if slot is None:
            return object_column([]), None
        found, error = slot.read(limit if len(self._slots) == 1 else 1)
        if slot.ended:
            slot.close()
            self._slots[turn] = self._next_file()
        return found, error

    def _look_ahead(self) -> None:
        """Let workers begin with the next files, one piece of each."""
        if self._workers is None:
            return
        while len(self._slots) + len(self._coming) < self._workers.executor.window:
            if self._coming and self._coming[-1] is None:
                break
            slot = self._open_next()
            if slot is not None:
                slot.start()
            self._coming.append(slot)

    def _next_file(self) -> RecordSlot | None:
        return self._coming.popleft() if self._coming else self._open_next()

    def _open_next(self) -> RecordSlot | None:
        number = self._names.num_taken
        try:
            path: str | ElementError = self._names.take()
        except StopIteration:
            return None
        except MACHINERY_ERRORS:
            raise
        except Exception as error:  # of the dataset of names: the error takes the place of the file
            path = ElementError(error)
        return self._slot(number, path)

    def _slot(
        self, number: int, path: str | ElementError, position: tuple[int, int, int] = (0, 0, 0), size: int = 0
    ) -> RecordSlot:
        return RecordSlot(
            self._op.format.open, number, path, position, ahead=self._op.ahead, size=size, workers=self._workers
        )

    def _position(self) -> IteratorState:
        slots = [None if slot is None else slot.state() for slot in self._slots]
        num_taken = self._names.num_taken - sum(slot is not None for slot in self._coming)
        return {"names": num_taken, "turn": self._turn, "files": slots}

    def state_dict(self) -> IteratorState:
        return self._open_outbox().state_dict()

    def load_state_dict(self, state: IteratorState) -> None:
        position = self._open_outbox().load_state_dict(state)
        files = position["files"]
        wanted = [entry[0] for entry in files if entry is not None]
        paths = self._names.retake(position["names"], wanted)
        turn_fits = int(position["turn"]) < max(1, len(files))
        if len(files) not in (0, self._op.cycle_length) or len(paths) < len(wanted) or not turn_fits:
            raise FailedPreconditionError(
                "A state must be loaded into the pipeline that it was saved from, but the files or num_parallel_reads "
                f"of this {self._op.name} differ: the state has {len(files)} files in turn, and was taken "
                f"after {position['names']} file names."
            )
        self._slots = [entry and self._resumed(_slot_numbers(entry), paths) for entry in files]
        self._turn = int(position["turn"])

    def _resumed(self, saved: Sequence[int], paths: Mapping[int, str | ElementError]) -> RecordSlot:
        number, offset, index, to_pass, size = saved
        path = paths[number]
        if isinstance(path, str):
            require_same_size(path, size)
        return self._slot(number, path, (offset, index, to_pass), size)

    def close(self) -> None:
        for slot in (*self._slots, *self._coming):
            if slot is not None:
                slot.close()
        self._names.close()


def _bytes_of(records: Column) -> int:
    if isinstance(records, RemoteColumn):
        return 0  # they lie elsewhere
    return sum(map(len, records)) + FRAME_BYTES * len(records)


def _slot_numbers(entry: Any) -> tuple[int, ...]:
    """Return the numbers in a slot's state. States of earlier versions have no size."""
    known = len(entry) if isinstance(entry, list) else 0
    return counts_in([*entry, 0] if known == _SLOT_NUMBERS - 1 else entry, _SLOT_NUMBERS)
