"""Datasets of the records of files, read one file after the other or in turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, final

import numpy as np

from raydist.errors import FailedPreconditionError, InvalidArgumentError
from raydist.nest import LEAF
from raydist.pipelines.blocks import Block
from raydist.pipelines.formats.byte_streams import ByteStream, open_stream
from raydist.pipelines.formats.tfrecord import BLOCK_BYTES, FRAME_BYTES
from raydist.pipelines.op import DatasetOp, ElementError, Item, IterContext, OpIterator, State
from raydist.pipelines.resume import Outbox
from raydist.pipelines.sources.file_names import FileNames, names_op
from raydist.pipelines.spec import BYTES, TensorSpec
from raydist.values import AUTOTUNE, UNKNOWN_CARDINALITY

__all__ = ["RecordFilesOp", "RecordFormat", "RecordReader"]

_SPEC = TensorSpec((), BYTES)


class RecordReader(Protocol):
    """Reads the records of one file in order.

    Attributes:
        offset: Where the next record starts, in decompressed bytes: a place to go on from.
        index: Number of the next record.
        ended: Nothing more can be read.
    """

    offset: int
    index: int
    ended: bool

    def read(self, limit: int, /) -> tuple[list[bytes], Exception | None]:
        """Up to `limit` next records, and the error that stands at the place after them. Neither of both: the end."""

    def close(self) -> None:
        """Close the file."""


class RecordFormat(ABC):
    """How a file is cut into records. Picklable."""

    name: ClassVar[str]
    """The public function that makes the dataset."""

    compression_type: str | None

    @abstractmethod
    def reader(self, stream: ByteStream, offset: int, index: int) -> RecordReader:
        """A reader of `stream` that begins at `offset`, the start of record `index`."""

    @final
    def open(self, path: str, offset: int, index: int) -> RecordReader:
        """A reader of the file at `path`; see :meth:`reader`."""
        stream = open_stream(path, self.compression_type)
        try:
            return self.reader(stream, offset, index)
        except BaseException:
            stream.close()
            raise


@final
@dataclass(frozen=True, eq=False)
class RecordFilesOp(DatasetOp):
    """The records of the files that `names` yields, as bytes.

    Attributes:
        names: An operation whose elements are file names.
        format: How the files are read.
        cycle_length: Files that take turns, one record each.
    """

    names: DatasetOp
    format: RecordFormat
    cycle_length: int = 1

    @classmethod
    def of(cls, filenames: Any, record_format: RecordFormat, num_parallel_reads: int | None) -> RecordFilesOp:
        """From the arguments that all readers share."""
        cycle = 1 if num_parallel_reads in (None, AUTOTUNE) else num_parallel_reads
        if not isinstance(cycle, int) or cycle < 1:
            raise InvalidArgumentError(
                f"num_parallel_reads must be >= 1, AUTOTUNE or None, got {num_parallel_reads!r}."
            )
        return cls(names_op(filenames), record_format, cycle)

    @property
    def inputs(self) -> tuple[DatasetOp, ...]:
        return (self.names,)

    @property
    def name(self) -> str:
        return self.format.name

    @property
    def label(self) -> str:
        compression = self.format.compression_type
        return f"{self.name}(compression_type={compression!r}, files in turn: {self.cycle_length})"

    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY

    def element_spec(self) -> Any:
        return _SPEC

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return RecordFilesIterator(self, FileNames(ctx.build(self.names)))


@final
class _Slot:
    """One file that takes part in the turns. Opened when its turn comes."""

    def __init__(self, op: RecordFilesOp, number: int, path: str, offset: int = 0, index: int = 0) -> None:
        self._op = op
        self._number = number
        self._path = path
        self._start = (offset, index)
        self._reader: RecordReader | None = None
        self._failed = False

    @property
    def ended(self) -> bool:
        """Whether the file is done with: read to its end, or unreadable."""
        return self._failed or (self._reader is not None and self._reader.ended)

    def read(self, limit: int) -> tuple[list[bytes], Exception | None]:
        """See :meth:`RecordReader.read`. A file that cannot be opened is one error."""
        if self._reader is None:
            try:
                self._reader = self._op.format.open(self._path, *self._start)
            except Exception as error:  # a missing file, a directory, ...
                self._failed = True
                return [], error
        return self._reader.read(limit)

    def state(self) -> list[int]:
        """Which file, and where it goes on."""
        offset, index = self._start if self._reader is None else (self._reader.offset, self._reader.index)
        return [self._number, offset, index]

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()


@final
class RecordFilesIterator(OpIterator):
    """Reads `cycle_length` files in turns.

    A slot whose file has ended stays empty until its next turn, and takes the next file then, as interleave does. The
    state is, for each slot, the number of its file and the offset in it.
    """

    def __init__(self, op: RecordFilesOp, names: FileNames) -> None:
        self._op = op
        self._names = names
        self._slots: list[_Slot | None] = [None] * op.cycle_length
        self._turn = 0
        self._names_ended = False
        self._outbox = Outbox(self._position())

    def next_block(self, limit: int) -> Block:
        while not self._outbox:
            items = self._take_turns(limit)
            if not items:
                raise StopIteration
            self._outbox.put(items, self._position())
        return self._outbox.take(limit)

    def _take_turns(self, limit: int) -> list[Item]:
        """Records up to `limit`, and the error after them if there is one; nothing at the end."""
        records: list[bytes] = []
        per_turn = limit if len(self._slots) == 1 else 1
        num_bytes = 0
        while len(records) < limit and num_bytes < BLOCK_BYTES and not (self._names_ended and not any(self._slots)):
            found, error = self._take_turn(min(per_turn, limit - len(records)))
            records.extend(found)
            num_bytes += sum(map(len, found)) + FRAME_BYTES * len(found)
            if error is not None:
                return [*_blocks(records), ElementError(error)]
        return _blocks(records)

    def _take_turn(self, limit: int) -> tuple[list[bytes], Exception | None]:
        """Records of the slot whose turn it is, and the error after them; then the turn passes on."""
        turn, self._turn = self._turn, (self._turn + 1) % len(self._slots)
        try:
            slot = self._slots[turn] = self._slots[turn] or self._next_file()
        except Exception as name_error:  # of the dataset of names
            return [], name_error
        if slot is None:
            return [], None
        found, error = slot.read(limit)
        if slot.ended:
            slot.close()
            self._slots[turn] = None
        return found, error

    def _next_file(self) -> _Slot | None:
        if self._names_ended:
            return None
        number = self._names.num_taken
        try:
            return _Slot(self._op, number, self._names.take())
        except StopIteration:
            self._names_ended = True
            return None

    def _position(self) -> State:
        slots = [None if slot is None else slot.state() for slot in self._slots]
        return {"names": self._names.num_taken, "turn": self._turn, "files": slots}

    def state_dict(self) -> State:
        return self._outbox.state_dict()

    def load_state_dict(self, state: State) -> None:
        position = self._outbox.load_state_dict(state)
        open_files = [entry for entry in position["files"] if entry is not None]
        paths = self._names.retake(position["names"], [number for number, _, _ in open_files])
        if len(position["files"]) != len(self._slots) or len(paths) < len(open_files):
            raise FailedPreconditionError(
                "A state must be loaded into the pipeline that it was saved from, but the files or num_parallel_reads "
                f"of this {self._op.name} differ: the state has {len(position['files'])} files in turn, and was taken "
                f"after {position['names']} file names."
            )
        self._slots = [e and _Slot(self._op, e[0], paths[e[0]], *e[1:]) for e in position["files"]]
        self._turn = int(position["turn"])

    def close(self) -> None:
        for slot in self._slots:
            if slot is not None:
                slot.close()
        self._names.close()


def _blocks(records: list[bytes]) -> list[Item]:
    if not records:
        return []
    column = np.empty(len(records), dtype=object)
    column[:] = records
    return [Block(LEAF, (_SPEC,), (column,), len(records))]
