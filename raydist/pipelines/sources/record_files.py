"""Datasets of the records of files, which are read one after the other or in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.core.nest import LEAF
from raydist.core.values import AUTOTUNE, UNKNOWN_CARDINALITY
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.columns import Column, RemoteColumn, columns_in_turn, concat_columns, object_column
from raydist.pipelines.elements.items import ElementError, Item, IteratorState
from raydist.pipelines.elements.saved_state import counts_in
from raydist.pipelines.engine.op import DatasetOp, IterContext
from raydist.pipelines.engine.op_iterator import MACHINERY_ERRORS, OpIterator
from raydist.pipelines.engine.producers import BorderIterator, ResumableProducer
from raydist.pipelines.formats.opening import local_size, require_same_size
from raydist.pipelines.formats.records import BLOCK_BYTES, RecordReader
from raydist.pipelines.formats.tfrecord import FRAME_BYTES
from raydist.pipelines.sources.file_format import RecordFormat
from raydist.pipelines.sources.file_names import FileNames, names_op
from raydist.pipelines.sources.pieces import Piece, PieceReader, PiecesAhead, PiecesOnWorkers, ReadingStage

OpenRecords = Callable[[str, int, int], RecordReader]
"""Function that opens the file at a path at an offset, the start of the record with an index."""

_NO_RECORDS = object_column([])
_SKIPPED_RECORDS = 1024  # read at a time while skipping to a saved position
_SLOT_NUMBERS = 5  # in the state of a slot: file number, start offset, start record, records to skip, file size


class _RecordsOnWorkers:
    """Pieces that workers read, as pieces of records."""

    def __init__(self, pieces: PiecesOnWorkers) -> None:
        self.start = pieces.start
        self.close = pieces.close
        self._pieces = pieces

    def read(self) -> Piece:
        items = self._pieces.read(0)
        records = [item.columns[0] for item in items if isinstance(item, Block)]
        error = next((item.error for item in items if isinstance(item, ElementError)), None)
        offset, index = self._pieces.position() or (0, 0)
        column = concat_columns(records) if records else _NO_RECORDS
        return Piece(column, error, offset, index, self._pieces.ended)


class RecordSlot:
    """A reader of the records of one file: in this thread, ahead in another thread, or by workers.

    Attributes:
        number: Number of the file among all files.
        ended: True once the last record, or the final error, was handed out and the end was seen.
    """

    def __init__(
        self,
        open_records: OpenRecords,
        number: int,
        path: str | ElementError,
        position: tuple[int, int, int] = (0, 0, 0),
        *,
        ahead: bool,
        size: int = 0,
        workers: ReadingStage | None = None,
    ) -> None:
        """Set up the reader from the numbers of `state`: `position` (offset, index, records to skip) and `size`."""
        self.number = number
        self.ended = False
        offset, index, self._to_pass = position
        self._begin = (offset, index)  # start of the current piece
        self._at = 0  # number of its records handed out
        self._piece: Piece | None = None
        self._error = path.error if isinstance(path, ElementError) else None
        text = "" if isinstance(path, ElementError) else path

        self._size = size or local_size(text)

        def open_reader() -> RecordReader:
            return open_records(text, offset, index)

        self._ahead: PiecesAhead | _RecordsOnWorkers | None = None
        if workers is not None and self._error is None and workers.suits(text):
            self._ahead = _RecordsOnWorkers(PiecesOnWorkers(workers, text, (offset, index)))
        elif ahead:
            self._ahead = PiecesAhead(open_reader, text)
        self._here = PieceReader(open_reader)

    def start(self) -> None:
        """Start to prefetch, if wanted. May be called again."""
        if self._ahead is not None and self._error is None:
            self._ahead.start()

    def ready(self) -> int:
        """Return the number of records that were read and not taken."""
        return 0 if self._piece is None or self._to_pass else len(self._piece.records) - self._at

    def take(self, limit: int) -> Column:
        """Return up to `limit` of the records that were read."""
        if self._piece is None:
            return _NO_RECORDS
        taken = self._piece.records[self._at : self._at + limit]
        self._at += len(taken)
        if self._at == len(self._piece.records) and self._piece.error is None and not self._piece.ended:
            self._pass_piece()
        return taken

    def read(self, limit: int) -> tuple[Column, Exception | None]:
        """Return up to `limit` records and the error that follows them. At the end, return no record and no error."""
        while not self.ready():
            error = self._take_error()
            if error is not None or self.ended:
                return _NO_RECORDS, error
            self._next_piece(limit)
        return self.take(limit), None

    def _take_error(self) -> Exception | None:
        """Return the next error, once. After it, or after the last record, the file has `ended`."""
        error, piece = self._error, self._piece
        if error is None and piece is not None and not self._to_pass:
            error = piece.error
        if error is not None or (piece is not None and not self._to_pass):
            self.ended = piece is None or piece.ended
            self._error = None
            self._pass_piece()
        return error

    def _next_piece(self, limit: int) -> None:
        self._pass_piece()
        if self._ahead is not None:
            piece = self._ahead.read()
        else:
            piece = self._here.read(max(limit, min(self._to_pass, _SKIPPED_RECORDS)))
        self._at = min(self._to_pass, len(piece.records))
        self._to_pass = 0 if piece.ended else self._to_pass - self._at
        self._piece = piece

    def _pass_piece(self) -> None:
        """Discard the current piece; the next one begins at its end."""
        if self._piece is not None:
            self._begin, self._at = (self._piece.offset, self._piece.index), 0
            self._piece = None

    def state(self) -> list[int]:
        """Return the file number, the start of the current piece, the records handed out since, and the file size."""
        return [self.number, *self._begin, self._at + self._to_pass, self._size]

    def close(self) -> None:
        self._here.close()
        if self._ahead is not None:
            self._ahead.close()


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

    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY

    def element_spec(self) -> Any:
        return self.format.spec

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        names = FileNames(replace(ctx, row_ids=False).build(self.names))
        return BorderIterator(_RecordFiles(self, names, ReadingStage.of(self, self.format, ctx)))


class _RecordFiles(ResumableProducer):
    """The records of `cycle_length` files that are read in turn.

    A slot whose file has ended takes the next file at once, and reads it from its next turn on: the order of
    interleave. The position has, for each slot, the number of its file and the position of its current piece.
    """

    def __init__(self, op: RecordFilesOp, names: FileNames, workers: ReadingStage | None = None) -> None:
        self._op = op
        self._names = names
        self._workers = workers
        self._coming: deque[RecordSlot | None] = deque()  # files that workers read ahead; None for no more files
        self._slots: list[RecordSlot | None] = []
        self._turn = 0

    def make(self, limit: int) -> Sequence[Item]:
        items = self._take_turns(limit)
        if not items:
            raise StopIteration
        return items

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
        column = concat_columns(records)
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
            self._op.format.open_records, number, path, position, ahead=self._op.ahead, size=size, workers=self._workers
        )

    def border(self) -> IteratorState:
        slots = [None if slot is None else slot.state() for slot in self._slots]
        num_taken = self._names.num_taken - sum(slot is not None for slot in self._coming)
        return {"names": num_taken, "turn": self._turn, "files": slots}

    def restore(self, border: IteratorState) -> None:
        files = border["files"]
        wanted = [entry[0] for entry in files if entry is not None]
        paths = self._names.retake(border["names"], wanted)
        turn_fits = int(border["turn"]) < max(1, len(files))
        if len(files) not in (0, self._op.cycle_length) or len(paths) < len(wanted) or not turn_fits:
            raise FailedPreconditionError(
                "A state must be loaded into the pipeline that it was saved from, but the files or num_parallel_reads "
                f"of this {self._op.name} differ: the state has {len(files)} files in turn, and was taken "
                f"after {border['names']} file names."
            )
        self._slots = [entry and self._resumed(counts_in(entry, _SLOT_NUMBERS), paths) for entry in files]
        self._turn = int(border["turn"])

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
