"""Restore values on parameter servers, from a worker: the worker tells each server which tensors to read.

Meanwhile the other workers are idle. The driver restores the objects that servers cannot restore: a module whose state
has more than variables, and an optimizer with tensors among its options.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import nn

from raydist.actors.portable_errors import pack_error
from raydist.checkpoints.entries import names_of_tensors, pack_state, unpack_state
from raydist.checkpoints.manifest import SavedCheckpoint, SavedObject
from raydist.checkpoints.object_state import kind_of_state, rejected_state, state_of
from raydist.checkpoints.parameter_names import GROUPS, fitting_entries, keep_types, parameter_names, parameters_of
from raydist.checkpoints.restore import (
    Difference,
    PreparedShard,
    RestoreRequest,
    differences_of,
    refused,
    state_differences,
    tensor_differences,
    tensor_named,
)
from raydist.checkpoints.tensor_file import FilePlace
from raydist.parameter_servers.client import Ask, PlacedVariables
from raydist.parameter_servers.optimizers import bare_optimizer
from raydist.parameter_servers.requests import BeginRestore
from raydist.parameter_servers.sharded_embedding import SavedRows, require_known
from raydist.parameter_servers.slices import PsSlice

_VERIFYING_SERVER = 0  # this server also reads and verifies the tensors that no server uses


@final
@dataclass(frozen=True, slots=True)
class StoredTable:
    """An embedding table, and the location of its rows in a checkpoint."""

    handle: int  # handle of the table on the servers
    saved: str  # object of the checkpoint that has the rows of the module's tables
    path: str  # path of the table in the module


@final
@dataclass(frozen=True, slots=True)
class StoredSlice:
    """A slice on a server, and the saved tensor with its values."""

    number: int  # number of the slice
    saved: str  # object of the checkpoint that has the tensor
    key: str  # name of the tensor in that object
    begin: int  # index of the slice's first row in the tensor


@final
@dataclass(frozen=True, slots=True)
class StoredOptimizerState:
    """The optimizer state of one slice."""

    owner: str  # name of the optimizer, for messages
    optimizer: int  # handle of the optimizer on the servers
    number: int  # number of the slice
    saved: str  # object of the checkpoint that has the state
    parameter: str  # name of the variable in that object
    shape: tuple[int, ...]  # shape of the variable
    begin: int  # index of the slice's first row in the variable
    entry: Any  # saved state of the variable, packed; None if there is none
    options: Mapping[str, Any]  # options of the saved parameter group

    def tensors(self) -> dict[str, bool]:
        """Return the names of tensors (True: may have a row for each row of the variable) and arrays (False)."""
        return dict(names_of_tensors(self.entry))


@final
@dataclass(frozen=True, slots=True)
class RestoreCommand:
    """The part of a restore that one server performs."""

    token: str  # unique id of the restore
    checkpoint: SavedCheckpoint  # the checkpoint, reduced to objects on servers
    tables: tuple[StoredTable, ...] = ()  # tables to read: each server reads the rows that it owns
    slices: tuple[StoredSlice, ...] = ()  # slices to read
    optimizer_states: tuple[StoredOptimizerState, ...] = ()  # optimizer states to read
    # tensors that no server uses, by object of the checkpoint: the server only reads and verifies them
    rest: Mapping[str, frozenset[str]] = field(default_factory=dict)


# torch wraps this method, and the wrapper would import torch's compiler.
_load = inspect.unwrap(torch.optim.Optimizer.load_state_dict)

_Kind = type[torch.optim.Optimizer]


def optimizer_state_differences(
    optimizer_states: Sequence[StoredOptimizerState],
    state_of: Callable[[StoredOptimizerState], Mapping[str, Any]],
    places: Mapping[str, Mapping[str, FilePlace]],
    like: Mapping[int, torch.Tensor],
) -> dict[str, tuple[Difference, ...]]:
    """Return, by optimizer name, the differences in shape or dtype between current and saved optimizer states.

    `state_of` returns the current state of a slice. `like` has a tensor with the shape of each slice, by slice number.
    """
    found: dict[str, tuple[Difference, ...]] = {}
    for stored in optimizer_states:
        common = _tensors_in_both(stored, state_of(stored), places[stored.saved], like[stored.number])
        found[stored.owner] = (*found.get(stored.owner, ()), *tensor_differences(stored.owner, common))
    return {name: several for name, several in found.items() if several}


def _tensors_in_both(
    stored: StoredOptimizerState, now: Mapping[str, Any], places: Mapping[str, FilePlace], like: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor, FilePlace]]:
    """Yield each tensor that both states have, with its shape for the whole variable."""
    for name, value in now.items():
        key = f"{stored.parameter}.{name}"
        if key in places and isinstance(value, torch.Tensor):
            is_like = bool(stored.shape) and value.shape == like.shape
            shape = stored.shape if is_like else tuple(value.shape)
            yield key, torch.empty(shape, dtype=value.dtype, device="meta"), places[key]


def loaded_state(stored: StoredOptimizerState, state: Any, kind: _Kind, dtype: torch.dtype) -> Mapping[str, Any]:
    """Return the state of a slice, as loaded by an optimizer of class `kind`.

    Raise InvalidArgumentError if the optimizer rejects the state.
    """
    parameter = torch.empty(0, dtype=dtype)
    optimizer = bare_optimizer(kind, [(stored.options, [parameter])])
    _load_into(stored.owner, optimizer, {0: state}, [{**stored.options, "params": [0]}])
    loaded: Mapping[str, Any] = optimizer.state[parameter]
    return loaded


def loaded_options(
    owner: str, optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the options that an optimizer's groups would have after loading saved groups.

    The optimizer stays unchanged. Of "params" in a saved group, only the length matters. Raise InvalidArgumentError if
    the optimizer rejects a group.

    >>> adam = torch.optim.Adam([torch.zeros(1)], lr=0.5)
    >>> loaded_options("optimizer", adam, [{"lr": 0.1, "params": ["weight"]}])[0]["lr"]
    0.1
    """
    bare = bare_optimizer(
        type(optimizer), [(group, [torch.empty(0) for _ in group["params"]]) for group in optimizer.param_groups]
    )
    _load_into(owner, bare, {}, [{**group, "params": list(range(len(group["params"])))} for group in saved])
    return [{name: value for name, value in group.items() if name != "params"} for group in bare.param_groups]


def _load_into(
    owner: str, optimizer: torch.optim.Optimizer, state: Mapping[int, Any], groups: Sequence[Mapping[str, Any]]
) -> None:
    loaded = {"state": dict(state), "param_groups": list(groups)}
    try:
        _load(optimizer, loaded)
        keep_types(optimizer, loaded)
    except Exception as error:
        raise rejected_state(owner, optimizer, error) from error


OptionGroups = Sequence[Mapping[str, Any]]


@final
@dataclass(frozen=True, slots=True)
class BegunRestore:
    """A worker's report on a restore. The servers have begun the restore only if every object fits its saved entry."""

    shard: PreparedShard  # differences by name, for the objects that servers restore
    # options of the parameter groups, by name of the optimizer
    options: Mapping[str, OptionGroups] = field(default_factory=dict)
    handles: frozenset[int] = frozenset()  # variables, tables and optimizers that servers restore


@final
@dataclass(frozen=True, slots=True)
class HandledRestore:
    """A restore of objects that the driver names by their handles."""

    request: RestoreRequest  # the restore
    # by name, the handle of each object; for rows of tables, of the module with the tables
    handles: Mapping[str, int | None]
    rows: frozenset[str]  # names of the objects that are rows of tables

    def objects(self, get: Callable[[int], Any]) -> dict[str, Any]:
        """Return the objects by name; `get` returns the object of a handle, or None."""
        found = {name: get(handle) for name, handle in self.handles.items() if handle is not None}
        return {name: SavedRows(obj) if name in self.rows else obj for name, obj in found.items() if obj is not None}


@final
class PsRestores:
    """The restores that a worker starts. Only the worker's single thread may use this object."""

    def __init__(self, placed: PlacedVariables) -> None:
        self._placed = placed

    def begin(
        self, request: RestoreRequest, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]
    ) -> BegunRestore:
        """Compare objects with their saved entries; if all fit, make every server begin to read its part.

        Blocks until the servers have begun.

        Raises:
            DataLossError: A saved entry is not a valid state.
            InvalidArgumentError: The rows belong to other tables, or an optimizer does not accept the options.
        """
        differences = {name: differences_from(name, obj, modules, request) for name, obj in objects.items()}
        if any(refused(found, request.strict) for found in differences.values()):
            return BegunRestore(PreparedShard(differences))
        for name, obj in objects.items():
            require_state(obj, request.checkpoint, request.saved[name])
        commands = RestoreCommands(request, modules, self._placed)
        on_servers = [name for name, obj in objects.items() if commands.add(name, obj)]
        if on_servers:
            asks = {server: Ask(BeginRestore(commands.of(server))) for server in range(self._placed.client.num_servers)}
            self._placed.client.exchange(asks)
        found = PreparedShard({name: differences[name] for name in on_servers})
        return BegunRestore(found, commands.options, frozenset(commands.handles))


def differences_from(
    name: str, obj: Any, modules: Mapping[str, nn.Module], request: RestoreRequest
) -> tuple[Difference, ...]:
    """Return the differences between an object and its saved entry.

    For rows of embedding tables, compare only the kind of the entry. Servers compare optimizer states.
    """
    saved = request.saved[name]
    if not isinstance(obj, SavedRows):
        return tuple(differences_of(name, obj, modules, request.checkpoint, saved))
    here, there = SavedObject(kind_of_state(obj), values={}), request.checkpoint.saved(saved)
    return tuple(state_differences(name, here, {}, there, request.checkpoint.places(saved)))


def require_state(obj: Any, checkpoint: SavedCheckpoint, saved: str) -> None:
    """Raise an error if the saved entry is not a state, or if it has rows of tables that `obj` does not have."""
    checkpoint.require_state(saved)
    if not isinstance(obj, SavedRows):
        return
    values = checkpoint.saved(saved).values
    if not isinstance(values, dict):
        raise checkpoint.loss(f"the state of {saved!r} is invalid: it has no tables")
    require_known(values, obj.tables())


@final
class RestoreCommands:
    """The commands of one restore, built object by object.

    Attributes:
        options: See `BegunRestore`.
        handles: See `BegunRestore`.
    """

    def __init__(self, request: RestoreRequest, modules: Mapping[str, nn.Module], placed: PlacedVariables) -> None:
        self._request, self._modules, self._placed = request, modules, placed
        self.options: dict[str, OptionGroups] = {}
        self.handles: set[int] = set()
        self._tables: list[StoredTable] = []
        self._slices: dict[int, tuple[int, StoredSlice]] = {}  # by slice number: the server and the slice
        self._optimizer_states: list[tuple[int, StoredOptimizerState]] = []
        self._verified: list[str] = []  # objects of the checkpoint whose tensors must all be verified

    def add(self, name: str, obj: Any) -> bool:
        """Add an object to the commands; return False if servers cannot restore the object."""
        values = self._request.checkpoint.saved(self._request.saved[name]).values
        if isinstance(obj, SavedRows):
            tables = obj.tables()
            self.add_rows(name, {path: self._placed.handle_of(table.weight) for path, table in tables.items()})
            return True
        if kind_of_state(obj) == "optimizer":
            return self._add_optimizer(name, obj, values)
        return isinstance(values, dict) and self._add_module(name, obj, values)

    def _add_module(self, name: str, module: nn.Module, saved: Mapping[str, Any]) -> bool:
        now = pack_state(state_of(module, {}), name)
        pairs = [(tensor_named(now.values[key]), tensor_named(saved[key])) for key in now.values if key in saved]
        tensors = {key: torch.as_tensor(now.tensors[key]) for key, _ in pairs if key is not None}
        places = self._placed.places(tensors)
        if None in {saved_key for _, saved_key in pairs} or any(
            tensor.numel() and key not in places for key, tensor in tensors.items()
        ):
            return False
        self.add_values(name, [(str(saved_key), places[key]) for key, saved_key in pairs if key in places])
        return True

    def _add_optimizer(self, name: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> bool:
        names = parameter_names(optimizer, self._modules)
        if next(names_of_tensors(saved[GROUPS]), None) is not None:
            return False
        entries = unpack_state({GROUPS: saved[GROUPS]}, {})
        self.options[name] = loaded_options(name, optimizer, self._groups(entries, optimizer, names))
        parameters = dict(zip(names, parameters_of(optimizer), strict=True))
        self.add_states(name, self._states(name, optimizer, parameters, saved, entries[GROUPS]))
        return True

    def _states(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, torch.Tensor],
        saved: Mapping[str, Any],
        groups: OptionGroups,
    ) -> Iterator[tuple[PsSlice, StoredOptimizerState]]:
        """Yield each slice of a saved parameter, with its optimizer state. Other parameters keep their state."""
        handle = self._placed.handle_of(optimizer)
        self.handles.add(handle)
        group_of = {parameter: group for group in groups for parameter in group["params"]}
        for parameter, parts in self._placed.places(parameters).items():
            if parameter not in group_of:
                continue
            options = {key: value for key, value in group_of[parameter].items() if key != "params"}
            for part in parts:
                stored = StoredOptimizerState(
                    owner=name,
                    optimizer=handle,
                    number=part.number,
                    saved=self._request.saved[name],
                    parameter=parameter,
                    shape=tuple(parameters[parameter].shape),
                    begin=part.begin,
                    entry=saved.get(parameter),
                    options=options,
                )
                yield part, stored

    def _groups(
        self, entries: Mapping[str, Any], optimizer: torch.optim.Optimizer, names: Sequence[str]
    ) -> OptionGroups:
        found: OptionGroups = entries[GROUPS]
        if self._request.strict:
            return found
        remaining = iter(names)
        here = [{**group, "params": [next(remaining) for _ in group["params"]]} for group in optimizer.param_groups]
        fitting: OptionGroups = fitting_entries({GROUPS: found}, {GROUPS: here})[GROUPS]
        return fitting

    def add_rows(self, name: str, tables: Mapping[str, int]) -> None:
        """Add the rows of embedding tables, given by path and handle."""
        saved = self._request.saved[name]
        self.handles.update(tables.values())
        self._tables += [StoredTable(handle, saved, path) for path, handle in tables.items()]

    def add_values(self, name: str, places: Sequence[tuple[str, Sequence[PsSlice]]]) -> None:
        """Add the values of a module's variables, given by the name of the saved tensor and the variable's slices.

        If a variable has several names, the last one counts, as in torch.
        """
        saved = self._request.saved[name]
        self._verified.append(saved)
        for key, parts in places:
            for part in parts:
                self.handles.add(part.handle)
                self._slices[part.number] = part.server, StoredSlice(part.number, saved, key, part.begin)

    def add_states(self, name: str, states: Iterable[tuple[PsSlice, StoredOptimizerState]]) -> None:
        """Add the state of an optimizer, given for each slice."""
        self._verified.append(self._request.saved[name])
        self._optimizer_states += [(part.server, stored) for part, stored in states]

    def of(self, server: int) -> RestoreCommand:
        """Return the command for a server."""
        return RestoreCommand(
            self._request.token,
            self._request.checkpoint,
            tuple(self._tables),
            tuple(each for owner, each in self._slices.values() if owner == server),
            tuple(each for owner, each in self._optimizer_states if owner == server),
            self._unused_tensors() if server == _VERIFYING_SERVER else {},
        )

    def _unused_tensors(self) -> dict[str, frozenset[str]]:
        used = {(each.saved, each.key) for _, each in self._slices.values()}
        used |= {(each.saved, key) for _, each in self._optimizer_states for key in each.tensors()}
        return {
            saved: frozenset(key for key in self._request.checkpoint.places(saved) if (saved, key) not in used)
            for saved in self._verified
        }


def begin_ps_restore(
    restores: PsRestores, request: RestoreRequest, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]
) -> bytes:
    """Begin a restore while the other workers are idle; return a pickled `BegunRestore` or `PortableError`."""
    try:
        return pickle.dumps(restores.begin(request, objects, modules))
    except Exception as error:
        return pickle.dumps(pack_error(error))


def follow_driver(restores: PsRestores) -> None:
    """Do nothing: a worker sends the driver's latest changes to the servers before it runs any function."""
