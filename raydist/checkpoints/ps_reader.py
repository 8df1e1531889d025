"""A parameter server's part of a restore: a thread reads values; the server takes them once all servers are ready."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from raydist.actors.portable_errors import PortableError, pack_error
from raydist.checkpoints.entries import stored_dtype, unpack_state
from raydist.checkpoints.manifest import SavedCheckpoint
from raydist.checkpoints.ps_restore import (
    RestoreCommand,
    StoredOptimizerState,
    loaded_state,
    optimizer_state_differences,
)
from raydist.checkpoints.read_tensors import read_pieces, read_slices
from raydist.checkpoints.restore import Difference, PreparedShard
from raydist.checkpoints.tensor_file import FilePlace, TensorFile
from raydist.core.errors import CancelledError, DataLossError, FailedPreconditionError, NotFoundError, RaydistError
from raydist.parameter_servers.row_table import RowTable
from raydist.parameter_servers.server_state import ServerRestorer, ServerState
from raydist.parameter_servers.sharded_embedding import parts_by_table
from raydist.pipelines.stored.directory_files import DirectoryFiles


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Target:
    """Memory for a tensor, or for some of its rows."""

    begin: int  # index of the first of these rows
    tensor: torch.Tensor  # the memory

    def is_at(self, place: FilePlace) -> bool:
        """Return True if a saved slice contains some of these rows."""
        return not place.shape or bool(self._common(*(place.rows or (0, place.shape[0]))))

    def take(self, begin: int, piece: torch.Tensor) -> None:
        """Copy the rows of a piece that belong here; `begin` is the index of the piece's first row."""
        if not piece.dim():
            self.tensor.copy_(piece)
        elif rows := self._common(begin, begin + len(piece)):
            self.tensor[rows.start - self.begin : rows.stop - self.begin] = piece[
                rows.start - begin : rows.stop - begin
            ]

    def _common(self, first: int, end: int) -> range:
        return range(max(first, self.begin), min(end, self.begin + len(self.tensor)))


@final
class StoredSlices:
    """The values of one command except rows of tables. The server's thread creates it; another thread may use it.

    `between` is called between two reads, and raises once the values are no longer wanted.

    Attributes:
        differences: By name of an optimizer, differences between the saved and the current state.
        values: By number of a slice, the values that `read` has read.
        optimizer_states: By handle of an optimizer and number of a slice, the optimizer state that `read` has read.
    """

    def __init__(self, command: RestoreCommand, held: ServerState, between: Callable[[], None] = lambda: None) -> None:
        self._command = command
        self._between = between
        numbers = {each.number for each in command.slices} | {each.number for each in command.optimizer_states}
        self._like = {number: torch.empty_like(held.value(number), device="meta") for number in numbers}
        self._kinds = {each.optimizer: held.optimizer_kind(each.optimizer) for each in command.optimizer_states}
        saved = dict.fromkeys(
            [*(each.saved for each in command.slices), *(each.saved for each in command.optimizer_states)]
        )
        self._places = {each: command.checkpoint.places(each) for each in saved}
        self.differences: dict[str, tuple[Difference, ...]] = optimizer_state_differences(
            command.optimizer_states,
            lambda stored: held.state(stored.optimizer, stored.number),
            self._places,
            self._like,
        )
        self.values: dict[int, torch.Tensor] = {}
        self.optimizer_states: dict[int, dict[int, Mapping[str, Any]]] = {each: {} for each in self._kinds}
        self._targets: dict[tuple[str, str], list[_Target]] = {}

    def open(self) -> None:
        """Verify the headers of all files of the command. Raise DataLossError if one is damaged or missing.

        Memory is allocated later, so that a checkpoint that claims a false size costs none.
        """
        for saved in dict.fromkeys((*self._places, *self._command.rest)):
            for file in self._command.checkpoint.files(saved):
                if saved in self._command.rest or self._has_some(saved, file):
                    read_slices(self._command.checkpoint.directory, file, ())

    def _has_some(self, saved: str, file: TensorFile) -> bool:
        wanted = {each.key for each in self._command.slices if each.saved == saved}
        wanted |= {key for each in self._command.optimizer_states if each.saved == saved for key in each.tensors()}
        return not wanted.isdisjoint(file.tensors)

    def read(self) -> None:
        """Read and verify all values. Raise DataLossError if one is damaged."""
        states = [self._tensors_for(each) for each in self._command.optimizer_states]
        for each in self._command.slices:
            self.values[each.number] = torch.empty_like(self._like[each.number], device="cpu")
            self._add_target(each.saved, each.key, _Target(each.begin, self.values[each.number]))
        for saved in dict.fromkeys((*self._places, *self._command.rest)):
            for file in self._command.checkpoint.files(saved):
                self._read_file(saved, file)
        for stored, tensors in zip(self._command.optimizer_states, states, strict=True):
            self.optimizer_states[stored.optimizer][stored.number] = self._state(stored, tensors)

    def _add_target(self, saved: str, key: str, target: _Target) -> None:
        self._targets.setdefault((saved, key), []).append(target)

    def _tensors_for(self, stored: StoredOptimizerState) -> dict[str, torch.Tensor]:
        """Allocate the tensors of a slice's optimizer state: the slice's rows for tensors shaped like the variable."""
        places, found = self._places[stored.saved], {}
        for key, has_rows in stored.tensors().items():
            place, like = places[key], self._like[stored.number]
            is_like = has_rows and bool(stored.shape) and place.shape == stored.shape
            found[key] = torch.empty(like.shape if is_like else place.shape, dtype=stored_dtype(place.dtype))
            self._add_target(stored.saved, key, _Target(stored.begin if is_like else 0, found[key]))
        return found

    def _read_file(self, saved: str, file: TensorFile) -> None:
        rest = self._command.rest.get(saved, frozenset())
        wanted = [key for key, place in file.tensors.items() if key in rest or self._is_wanted(saved, key, place)]
        if not wanted:
            return
        for key, begin, piece in read_pieces(self._command.checkpoint.directory, file, wanted):
            self._between()
            for target in self._targets.get((saved, key), ()):
                target.take(begin, piece)

    def _is_wanted(self, saved: str, key: str, place: FilePlace) -> bool:
        return any(target.is_at(place) for target in self._targets.get((saved, key), ()))

    def _state(self, stored: StoredOptimizerState, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
        if stored.entry is None:
            return {}
        state, like = unpack_state(stored.entry, tensors), self._like[stored.number]
        if not isinstance(state, dict):
            raise ValueError(f"what is remembered of {stored.parameter!r:.100} is no dict")
        return loaded_state(stored, state, self._kinds[stored.optimizer], like.dtype)


@final
@dataclass(frozen=True, slots=True)
class StoredColumn:
    """A value of every row that one server had (a `RowColumn`)."""

    directory: DirectoryFiles  # directory of the checkpoint
    file: TensorFile  # the file with the values
    key: str  # name of the tensor in the file
    between: Callable[[], None]  # called between two reads; raises once the values are no longer wanted

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole column."""
        return self.file.tensors[self.key].slice_shape

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yield some rows at a time. Raise DataLossError if they differ from what was saved."""
        for _, _, rows in read_pieces(self.directory, self.file, (self.key,)):
            self.between()
            yield rows


@final
class StoredRows:
    """The saved rows of the tables of one module: the object `saved` of the checkpoint."""

    def __init__(self, checkpoint: SavedCheckpoint, saved: str, between: Callable[[], None] = lambda: None) -> None:
        self._checkpoint = checkpoint
        self._saved = saved
        self._between = between
        self._scalars: dict[str, torch.Tensor] = {}

    def open(self) -> None:
        """Verify the headers of all files and read the scalars. Raise DataLossError if a file is damaged or missing."""
        for file in self._checkpoint.files(self._saved):
            small = [key for key, place in file.tensors.items() if not place.shape]
            self._scalars |= read_slices(self._checkpoint.directory, file, small)

    def states(self, path: str) -> Sequence[Any]:
        """Return the saved state of a table from each server, for `RowTable.load`. Call `open` first."""
        stored: dict[str, Any] = {
            key: StoredColumn(self._checkpoint.directory, file, key, self._between)
            for file in self._checkpoint.files(self._saved)
            for key in file.tensors
        }
        entries = parts_by_table(self._checkpoint.saved(self._saved).values, [path]).get(path, [])
        return [unpack_state(entry, stored | self._scalars) for entry in entries]

    def load_into(self, table: RowTable, path: str) -> None:
        """Load the rows of `path` into a table that is not in use yet. Raise DataLossError if they are invalid."""
        with as_data_loss(self._checkpoint, f"the rows of {self._saved!r} are invalid"):
            table.load(self.states(path))


@contextlib.contextmanager
def as_data_loss(checkpoint: SavedCheckpoint, problem: str) -> Iterator[None]:
    """Convert errors inside the `with` block to DataLossError: the saved values caused them."""
    try:
        yield
    except RaydistError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise checkpoint.loss(f"{problem}: {error!s:.300}") from error


@final
class ServerReader(ServerRestorer):
    """The restores of one server."""

    def __init__(self) -> None:
        self._reading: _Reading | None = None

    def begin(self, command: RestoreCommand, held: ServerState) -> None:
        if self._reading is not None and self._reading.command.token == command.token:
            return  # the worker that asked has died, and another one asks
        self.discard()
        self._reading = _Reading(command, held)
        self._reading.start()

    def report(self, token: str) -> PreparedShard | PortableError | None:
        reading = self._known(token)
        return None if reading is None else reading.outcome

    def commit(self, token: str, held: ServerState) -> None:
        reading = self._known(token)
        if reading is None or reading.outcome != PreparedShard():
            raise FailedPreconditionError("raydist bug: a server must have read its part before it is given that.")
        held.replace(reading.tables, reading.slices.values, reading.slices.optimizer_states)
        self._reading = None

    def _known(self, token: str) -> _Reading | None:
        reading = self._reading
        return None if reading is None or reading.command.token != token else reading

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
    """One restore command in progress.

    Attributes:
        tables: By handle, new tables for the rows, which are not in use yet.
        slices: All other values.
    """

    def __init__(self, command: RestoreCommand, held: ServerState) -> None:
        self.command = command
        self.tables: Mapping[int, RowTable] = {
            table.handle: held.table(table.handle).anew() for table in command.tables
        }
        self.slices = StoredSlices(command, held, self._require_wanted)
        self.outcome: PreparedShard | PortableError | None = None
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

    def _read(self) -> PreparedShard:
        if self.slices.differences:
            return PreparedShard(self.slices.differences)
        stored = {
            saved: StoredRows(self.command.checkpoint, saved, self._require_wanted)
            for saved in {table.saved for table in self.command.tables}
        }
        try:
            for each in stored.values():
                each.open()
            self.slices.open()
        except Exception as error:
            if isinstance(error, DataLossError) and not isinstance(error.__cause__, NotFoundError):
                raise
            return PreparedShard(sees_files=False)
        for table in self.command.tables:
            stored[table.saved].load_into(self.tables[table.handle], table.path)
        with as_data_loss(self.command.checkpoint, "one of its states is invalid"):
            self.slices.read()
        return PreparedShard()

    def _require_wanted(self) -> None:
        if not self._is_wanted:
            raise CancelledError(f"Restore {self.command.token} was given up before all was read. Begin another one.")
