"""Save values on parameter servers: a worker tells each server its slices; the server copies and writes them.

The worker's half runs while no other worker does anything, so that the servers' values are consistent. Small objects,
and tensors that no server has (a tensor that a module computes for its state), go to one of the servers along with the
command. A server copies its slices between two requests, and writes them in a thread.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import nn

from raydist.actors.portable_errors import PortableError, pack_error
from raydist.checkpoints.capture import CapturedObject, captured_object
from raydist.checkpoints.entries import pack_state
from raydist.checkpoints.manifest import SavedObject
from raydist.checkpoints.object_state import class_of_state, kind_of_state, state_of
from raydist.checkpoints.parameter_names import parameter_names, parameters_of
from raydist.checkpoints.shards import SaveReports, Shard, ShardRequest
from raydist.checkpoints.tensor_file import (
    MAX_PART_BYTES,
    NewFiles,
    RowRange,
    TensorFile,
    plan_parts,
    write_tensor_file,
)
from raydist.core.errors import UnavailableError
from raydist.parameter_servers.client import Ask, PlacedVariables
from raydist.parameter_servers.optimizers import state_bytes_per_byte
from raydist.parameter_servers.requests import BeginSave
from raydist.parameter_servers.server_state import ServerSaver, ServerState
from raydist.parameter_servers.sharded_embedding import SavedRows, row_entry
from raydist.parameter_servers.slices import PsSlice


@final
@dataclass(frozen=True, slots=True)
class SlicePlace:
    """A slice on a server, as a part of a saved tensor."""

    key: str  # name of the tensor; name of the parameter if an optimizer's state is saved
    number: int  # number of the slice
    rows: RowRange | None = None  # rows of the tensor in the slice; None for the whole tensor

    @property
    def is_first(self) -> bool:
        """True for the slice that carries the state of the tensor as a whole."""
        return self.rows is None or self.rows.start == 0


@final
@dataclass(frozen=True, slots=True)
class SliceFile:
    """One file that a server writes."""

    owner: str  # name of the saved object
    number: int = 0  # index among the object's files
    name: str = ""  # name of the file
    slices: tuple[SlicePlace, ...] = ()  # slices in the file
    # handle of the optimizer whose state of these slices is saved, instead of the slices' values
    optimizer: int | None = None
    given: tuple[str, ...] = ()  # names of tensors that are on no server and are sent with the command, in this order
    tables: tuple[tuple[str, int], ...] = ()  # entry name and handle of each embedding table whose rows are saved


@final
@dataclass(frozen=True, slots=True)
class SaveCommand:
    """The part of a save that one server performs."""

    token: str  # id of the save
    new: NewFiles  # directory and names of the files
    files: tuple[SliceFile, ...] = ()  # files that the server writes


@final
class SaveCommands:
    """The commands of one save, built object by object."""

    def __init__(self, request: ShardRequest, num_servers: int, max_part_bytes: int = MAX_PART_BYTES) -> None:
        self._request = request
        self._most = max_part_bytes
        self._files: list[list[SliceFile]] = [[] for _ in range(num_servers)]
        self._tensors: list[list[torch.Tensor]] = [[] for _ in range(num_servers)]
        self._bytes = [0] * num_servers

    def add(
        self,
        owner: str,
        places: Mapping[str, Sequence[PsSlice]],
        given: Mapping[str, torch.Tensor],
        *,
        optimizer: int | None = None,
        size_ratio: float = 1.0,
    ) -> None:
        """Add an object: slices that are on servers, and `given` tensors that are on none.

        `optimizer` as in `SliceFile`. For each byte of a slice, `size_ratio` bytes are saved.
        """
        files = self._files_of_slices(SliceFile(owner, optimizer=optimizer), places, size_ratio)
        if given:
            server = self._bytes.index(min(self._bytes))
            files.append((server, SliceFile(owner, given=tuple(given))))
            self._tensors[server] += [tensor.detach().to("cpu").contiguous() for tensor in given.values()]
            self._bytes[server] += sum(tensor.nbytes for tensor in given.values())
        self._add_files(owner, files)

    def add_rows(self, owner: str, tables: Mapping[str, int]) -> None:
        """Add the rows of embedding tables, given their handles by path. Each server has some of the rows."""
        files = [
            (
                server,
                SliceFile(owner, tables=tuple((row_entry(path, server), handle) for path, handle in tables.items())),
            )
            for server in range(len(self._files))
        ]
        self._add_files(owner, files)

    def _add_files(self, owner: str, files: Sequence[tuple[int, SliceFile]]) -> None:
        for number, (server, file) in enumerate(files):
            name = self._request.file_name(owner, number, len(files))
            self._files[server].append(replace(file, number=number, name=name))

    def _files_of_slices(
        self, like: SliceFile, places: Mapping[str, Sequence[PsSlice]], size_ratio: float
    ) -> list[tuple[int, SliceFile]]:
        files: list[tuple[int, SliceFile]] = []
        for server in range(len(self._files)):
            mine = {place.key: (place, part) for place, part in _places(places) if part.server == server}
            sizes = {key: int(part.num_bytes * size_ratio) for key, (_, part) in mine.items()}
            for keys in plan_parts(sizes, self._most) if mine else []:
                files.append((server, replace(like, slices=tuple(mine[key][0] for key in keys))))
            self._bytes[server] += sum(sizes.values())
        return files

    def of(self, server: int) -> tuple[SaveCommand, list[torch.Tensor]]:
        """Return the command for a server, and the tensors to send with the command."""
        return SaveCommand(self._request.token, self._request.new, tuple(self._files[server])), self._tensors[server]


def _places(places: Mapping[str, Sequence[PsSlice]]) -> Iterable[tuple[SlicePlace, PsSlice]]:
    for key, parts in places.items():
        whole = sum(part.shape[0] for part in parts) if parts[0].shape else 0
        for part in parts:
            rows = RowRange(part.begin, part.begin + part.shape[0], whole) if len(parts) > 1 else None
            yield SlicePlace(key, part.number, rows), part


_TOKENS = 16  # saves to know, more than are written at a time


@final
class ServerWriter(ServerSaver):
    """The saves of one server."""

    def __init__(self) -> None:
        self._reports = SaveReports()
        self._begun: deque[str] = deque(maxlen=_TOKENS)

    def begin(self, command: SaveCommand, tensors: Sequence[torch.Tensor], held: ServerState) -> None:
        if command.token in self._begun:  # the worker that asked has died, and another one asks: nothing has changed
            return
        self._begun.append(command.token)
        try:
            copied = _Copied(command, tensors, held)
        except Exception as error:
            self._reports.record(command.token, error)
            return
        self._reports.write(command.token, lambda: Shard(copied.write(), entries=copied.entries))

    def report(self, token: str) -> Shard | PortableError | None:
        found = self._reports.of(token)
        if found is None and token not in self._begun:
            return pack_error(
                UnavailableError("A server of this save was replaced before it had written its part. Save again.")
            )
        return pack_error(found) if isinstance(found, Exception) else found

    def close(self, within_s: float) -> None:
        self._reports.close(within_s)


@final
class _Copied:
    """Copies of the current values that a command asks for."""

    def __init__(self, command: SaveCommand, tensors: Sequence[torch.Tensor], held: ServerState) -> None:
        self._new = command.new
        self.entries: dict[str, dict[str, Any]] = {}
        self._files: list[tuple[SliceFile, dict[str, torch.Tensor], dict[str, RowRange]]] = []
        given = iter(tensors)
        for file in command.files:
            found = {key: next(given).clone() for key in file.given}
            rows: dict[str, RowRange] = {}
            for place in file.slices:
                parts = self._values(place, held) if file.optimizer is None else self._state(file, place, held)
                for key, tensor in parts.items():
                    if place.rows is not None and tensor.shape == held.value(place.number).shape:
                        rows[key] = place.rows
                    found[key] = _copy(tensor)
            for entry, handle in file.tables:
                packed = pack_state({entry: dict(held.table_state(handle))}, file.owner)  # copies
                self.entries.setdefault(file.owner, {})[entry] = packed.values[entry]
                found |= {key: torch.as_tensor(tensor) for key, tensor in packed.tensors.items()}
            self._files.append((file, found, rows))

    def _values(self, place: SlicePlace, held: ServerState) -> dict[str, torch.Tensor]:
        return {place.key: held.value(place.number)}

    def _state(self, file: SliceFile, place: SlicePlace, held: ServerState) -> Mapping[str, torch.Tensor]:
        """Return the optimizer state of a slice; the first slice also carries the state of the parameter as a whole."""
        state = held.state(int(file.optimizer or 0), place.number)
        if not state:
            return {}
        shape = held.value(place.number).shape
        packed = pack_state({place.key: dict(state)}, file.owner)
        tensors = {key: torch.as_tensor(tensor) for key, tensor in packed.tensors.items()}
        if place.is_first:
            self.entries.setdefault(file.owner, {})[place.key] = packed.values[place.key]
            return tensors
        return {key: tensor for key, tensor in tensors.items() if tensor.shape == shape and len(shape)}

    def write(self) -> dict[tuple[str, int], TensorFile]:
        """Write all copies."""
        return {
            (file.owner, file.number): write_tensor_file(self._new, file.name, tensors, rows)
            for file, tensors, rows in self._files
            if tensors
        }


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


@final
class PsSaves:
    """The saves that a worker starts. Used by the worker's single thread."""

    def __init__(self, placed: PlacedVariables) -> None:
        self._placed = placed

    def begin(self, request: ShardRequest, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> bytes:
        """Make every server copy its part and begin to write it. Blocks until the servers have begun.

        Returns:
            A pickled `Shard` without files: the values that are not tensors.
        """
        commands = SaveCommands(request, self._placed.client.num_servers)
        saved: dict[str, SavedObject] = {}
        for name, obj in objects.items():
            if isinstance(obj, SavedRows):
                tables = obj.tables()
                commands.add_rows(name, {path: self._placed.handle_of(table.weight) for path, table in tables.items()})
                found = CapturedObject(SavedObject(kind_of_state(obj), values={}))
            elif kind_of_state(obj) == "optimizer":
                found = self._add_optimizer(commands, name, obj, modules, request.terms.small_bytes)
            else:
                found = self._add(commands, name, obj, modules, request.terms.small_bytes)
            saved[name] = found.saved
        asks = {}
        for server in range(self._placed.client.num_servers):
            command, tensors = commands.of(server)
            asks[server] = Ask(BeginSave(command), tensors)
        self._placed.client.exchange(asks)
        return pickle.dumps(Shard({}, saved))

    def _add(
        self, commands: SaveCommands, name: str, obj: Any, modules: Mapping[str, nn.Module], small_bytes: int
    ) -> CapturedObject:
        found = _captured(name, obj, modules)
        is_small = sum(tensor.nbytes for tensor in found.tensors.values()) <= small_bytes
        places = {} if is_small else self._placed.places(found.tensors)
        commands.add(name, places, {key: each for key, each in found.tensors.items() if key not in places})
        return found

    def _add_optimizer(
        self,
        commands: SaveCommands,
        name: str,
        optimizer: torch.optim.Optimizer,
        modules: Mapping[str, nn.Module],
        small_bytes: int,
    ) -> CapturedObject:
        named = dict(zip(parameter_names(optimizer, modules), parameters_of(optimizer), strict=True))
        size_ratio = max(state_bytes_per_byte(type(optimizer), group) for group in optimizer.param_groups)
        try:
            if sum(tensor.nbytes for tensor in named.values()) * size_ratio <= small_bytes:
                self._placed.read_states([optimizer])
                return self._add(commands, name, optimizer, modules, small_bytes)
            places = self._placed.places(named)
            commands.add(name, places, {}, optimizer=self._placed.handle_of(optimizer), size_ratio=size_ratio)
            return _captured(name, optimizer, modules)
        finally:
            optimizer.state.clear()  # optimizers have no state on a worker


def _captured(name: str, obj: Any, modules: Mapping[str, nn.Module]) -> CapturedObject:
    return captured_object(name, kind_of_state(obj), class_of_state(obj), state_of(obj, modules), copy=False)


def begin_ps_save(
    shards: PsSaves, request: ShardRequest, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]
) -> bytes:
    """Begin a save on a worker while no other runs anything; return a pickled `Shard` or `PortableError`.

    An error fails only the save: closures scheduled after it continue.
    """
    try:
        return shards.begin(request, objects, modules)
    except Exception as error:
        return pickle.dumps(pack_error(error))
