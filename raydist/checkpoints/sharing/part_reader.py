"""A parameter server's part of a restore: it is read in a thread, and becomes the server's once all have theirs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from raydist.actors.portable_errors import PortableError, pack_error
from raydist.checkpoints.differences import Difference
from raydist.checkpoints.dtypes import stored_dtype
from raydist.checkpoints.entries import unpack_state
from raydist.checkpoints.read_tensors import read_pieces, read_rows, read_slices
from raydist.checkpoints.saved_checkpoint import SavedCheckpoint
from raydist.checkpoints.sharing.restore_orders import RestoreOrder, StoredMemory, StoredTable
from raydist.checkpoints.sharing.restore_request import PreparedShare
from raydist.checkpoints.sharing.stored_memories import memory_differences, taken_state
from raydist.checkpoints.tensor_file import FilePlace, TensorFile
from raydist.errors import CancelledError, DataLossError, FailedPreconditionError, NotFoundError, RaydistError
from raydist.parameter_servers.rows.saved_rows import parts_by_table
from raydist.parameter_servers.serving.embedding_tables import ServedTable
from raydist.parameter_servers.serving.part_restorer import PartHolder, PartRestorer
from raydist.pipelines.stored.directory_files import DirectoryFiles

__all__ = ["PartReader", "StoredColumn", "StoredRows", "StoredSlices"]


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Target:
    """Memory for a tensor, or for some of its rows.

    Attributes:
        begin: The first of these rows.
        tensor: The memory.
    """

    begin: int
    tensor: torch.Tensor

    def is_at(self, place: FilePlace) -> bool:
        """Whether something of it lies at a place."""
        return not place.shape or not self._between(place.rows or (0, place.shape[0])).is_empty

    def take(self, begin: int, piece: torch.Tensor) -> None:
        """Have what of a piece, whose first row is this one, belongs here."""
        if not piece.dim():
            self.tensor.copy_(piece)
            return
        found = self._between((begin, begin + len(piece)))
        if not found.is_empty:
            self.tensor[found.moved(-self.begin)] = piece[found.moved(-begin)]

    def _between(self, rows: tuple[int, int]) -> _Rows:
        return _Rows(max(rows[0], self.begin), min(rows[1], self.begin + len(self.tensor)))


@final
@dataclass(frozen=True, slots=True)
class _Rows:
    first: int
    last: int

    @property
    def is_empty(self) -> bool:
        return self.first >= self.last

    def moved(self, by: int) -> slice:
        return slice(self.first + by, self.last + by)


@final
class StoredSlices:
    """What one order asks for beside rows of tables. The server's thread makes it, another one may use it.

    Args:
        order: That.
        held: What the server has.
        between: Called between two reads: raises where nobody wants any more of them.

    Attributes:
        differences: By name of an optimizer, what of its state does not fit what it remembers now.
        values: By number of a slice, what `read` has read.
        memories: By handle of an optimizer and number of a slice, what it is to remember.
    """

    def __init__(self, order: RestoreOrder, held: PartHolder, between: Callable[[], None] = lambda: None) -> None:
        self._order = order
        self._between = between
        numbers = {each.number for each in order.slices} | {each.number for each in order.memories}
        self._like = {number: torch.empty_like(held.value(number), device="meta") for number in numbers}
        self._kinds = {each.optimizer: held.optimizer_kind(each.optimizer) for each in order.memories}
        saved = dict.fromkeys([*(each.saved for each in order.slices), *(each.saved for each in order.memories)])
        self._places = {each: order.checkpoint.places(each) for each in saved}
        self.differences: dict[str, tuple[Difference, ...]] = memory_differences(
            order.memories, lambda memory: held.state(memory.optimizer, memory.number), self._places, self._like
        )
        self.values: dict[int, torch.Tensor] = {}
        self.memories: dict[int, dict[int, Mapping[str, Any]]] = {each: {} for each in self._kinds}
        self._targets: dict[tuple[str, str], list[_Target]] = {}

    def open(self) -> None:
        """Read the headers of all files that there may be something in. DataLossError where one is damaged or missing.

        Memory is made afterwards: a checkpoint that says it is larger than it is costs none.
        """
        for saved in dict.fromkeys((*self._places, *self._order.rest)):
            for file in self._order.checkpoint.files(saved):
                if saved in self._order.rest or self._has_some(saved, file):
                    read_slices(self._order.checkpoint.directory, file, ())

    def _has_some(self, saved: str, file: TensorFile) -> bool:
        wanted = {each.key for each in self._order.slices if each.saved == saved}
        wanted |= {key for each in self._order.memories if each.saved == saved for key in each.tensors()}
        return not wanted.isdisjoint(file.tensors)

    def read(self) -> None:
        """Read and check everything. DataLossError where something is damaged."""
        states = [self._memory_for(each) for each in self._order.memories]
        for each in self._order.slices:
            self.values[each.number] = torch.empty_like(self._like[each.number], device="cpu")
            self._add_target(each.saved, each.key, _Target(each.begin, self.values[each.number]))
        for saved in dict.fromkeys((*self._places, *self._order.rest)):
            for file in self._order.checkpoint.files(saved):
                self._read_file(saved, file)
        for memory, tensors in zip(self._order.memories, states, strict=True):
            self.memories[memory.optimizer][memory.number] = self._state(memory, tensors)

    def _add_target(self, saved: str, key: str, target: _Target) -> None:
        self._targets.setdefault((saved, key), []).append(target)

    def _memory_for(self, memory: StoredMemory) -> dict[str, torch.Tensor]:
        """By name, memory for tensors that are to be remembered of a slice: its own rows of those like the variable."""
        places, found = self._places[memory.saved], {}
        for key, has_rows in memory.tensors().items():
            place, like = places[key], self._like[memory.number]
            is_like = has_rows and bool(memory.shape) and place.shape == memory.shape
            found[key] = torch.empty(like.shape if is_like else place.shape, dtype=stored_dtype(place.dtype))
            self._add_target(memory.saved, key, _Target(memory.begin if is_like else 0, found[key]))
        return found

    def _read_file(self, saved: str, file: TensorFile) -> None:
        rest = self._order.rest.get(saved, frozenset())
        wanted = [key for key, place in file.tensors.items() if key in rest or self._is_wanted(saved, key, place)]
        if not wanted:
            return
        for key, begin, piece in read_pieces(self._order.checkpoint.directory, file, wanted):
            self._between()
            for target in self._targets.get((saved, key), ()):
                target.take(begin, piece)

    def _is_wanted(self, saved: str, key: str, place: FilePlace) -> bool:
        return any(target.is_at(place) for target in self._targets.get((saved, key), ()))

    def _state(self, memory: StoredMemory, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
        if memory.entry is None:
            return {}
        state, like = unpack_state(memory.entry, tensors), self._like[memory.number]
        if not isinstance(state, dict):
            raise ValueError(f"what is remembered of {memory.parameter!r:.100} is no dict")
        return taken_state(memory, state, self._kinds[memory.optimizer], like.dtype)


@final
@dataclass(frozen=True, slots=True)
class StoredColumn:
    """Something of every row that one server had (a `RowColumn`).

    Attributes:
        directory: Of the checkpoint.
        file: The one that has it.
        key: What it is called there.
        between: Called between two reads: raises where nobody wants any more of them.
    """

    directory: DirectoryFiles
    file: TensorFile
    key: str
    between: Callable[[], None]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all of it."""
        return self.file.tensors[self.key].slice_shape

    def pieces(self) -> Iterator[torch.Tensor]:
        """Some rows at a time. DataLossError where they are not as they were saved."""
        for rows in read_rows(self.directory, self.file, self.key):
            self.between()
            yield rows


@final
class StoredRows:
    """The saved rows of the tables of one module.

    Args:
        checkpoint: The one that has them.
        saved: Under which name.
        between: See `StoredColumn`.
    """

    def __init__(self, checkpoint: SavedCheckpoint, saved: str, between: Callable[[], None] = lambda: None) -> None:
        self._checkpoint = checkpoint
        self._saved = saved
        self._between = between
        self._scalars: dict[str, torch.Tensor] = {}

    def open(self) -> None:
        """Read the headers of all files, and what is no row: small. DataLossError where one is damaged or missing."""
        for file in self._checkpoint.files(self._saved):
            small = [key for key, place in file.tensors.items() if not place.shape]
            self._scalars |= read_slices(self._checkpoint.directory, file, small)

    def states(self, path: str) -> Sequence[Any]:
        """What was saved of the table of this path by each server, for `RowTable.load`. After `open`."""
        stored: dict[str, Any] = {
            key: StoredColumn(self._checkpoint.directory, file, key, self._between)
            for file in self._checkpoint.files(self._saved)
            for key in file.tensors
        }
        entries = parts_by_table(self._checkpoint.saved(self._saved).values, [path]).get(path, [])
        return [unpack_state(entry, stored | self._scalars) for entry in entries]


@final
class PartReader(PartRestorer):
    """The restores of one server."""

    def __init__(self) -> None:
        self._reading: _Reading | None = None

    def begin(self, order: RestoreOrder, held: PartHolder) -> None:
        if self._reading is not None and self._reading.order.token == order.token:
            return  # its worker has died, and another one asks
        self.discard()
        self._reading = _Reading(order, held)
        self._reading.start()

    def report(self, token: str) -> PreparedShare | PortableError | None:
        reading = self._known(token)
        return None if reading is None else reading.outcome

    def commit(self, token: str, held: PartHolder) -> None:
        reading = self._known(token)
        if reading is None or reading.outcome != PreparedShare():
            raise FailedPreconditionError("raydist bug: a server must have read its part before it is given that.")
        held.replace(reading.tables, reading.slices.values, reading.slices.memories)
        self._reading = None

    def _known(self, token: str) -> _Reading | None:
        reading = self._reading
        return None if reading is None or reading.order.token != token else reading

    def discard(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.stop()

    def close(self, within_s: float) -> None:
        reading = self._reading
        self.discard()
        if reading is not None:
            reading.join(within_s)


@final
class _Reading:
    """One order on its way.

    Args:
        order: That.
        held: What the server has.

    Attributes:
        tables: By handle, those that rows go into: nobody has them yet.
        slices: All else.
    """

    def __init__(self, order: RestoreOrder, held: PartHolder) -> None:
        self.order = order
        self.tables: Mapping[int, ServedTable] = {
            table.handle: held.table(table.handle).anew() for table in order.tables
        }
        self.slices = StoredSlices(order, held, self._require_wanted)
        self.outcome: PreparedShare | PortableError | None = None
        self._is_wanted = True
        self._thread = threading.Thread(target=self._run, name="raydist-restore", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_wanted = False

    def join(self, within_s: float) -> None:
        self._thread.join(within_s)

    def _run(self) -> None:
        try:
            self.outcome = self._read()
        except Exception as error:
            self.outcome = pack_error(error)

    def _read(self) -> PreparedShare:
        if self.slices.differences:
            return PreparedShare(self.slices.differences)
        stored = {
            saved: StoredRows(self.order.checkpoint, saved, self._require_wanted)
            for saved in {table.saved for table in self.order.tables}
        }
        try:
            for each in stored.values():
                each.open()
            self.slices.open()
        except Exception as error:
            if isinstance(error, DataLossError) and not isinstance(error.__cause__, NotFoundError):
                raise
            return PreparedShare(sees_files=False)
        for table in self.order.tables:
            self._load(table, stored[table.saved])
        with self._none("a state that it has is none"):
            self.slices.read()
        return PreparedShare()

    def _load(self, table: StoredTable, stored: StoredRows) -> None:
        with self._none(f"the rows of {table.saved!r} are none"):
            self.tables[table.handle].load(stored.states(table.path))

    @contextlib.contextmanager
    def _none(self, problem: str) -> Iterator[None]:
        """What goes wrong inside does so because of what was saved."""
        try:
            yield
        except RaydistError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise self.order.checkpoint.loss(f"{problem}: {error!s:.300}") from error

    def _require_wanted(self) -> None:
        if not self._is_wanted:
            raise CancelledError(f"Restore {self.order.token} was given up before all was read. Begin another one.")
