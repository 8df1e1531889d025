"""A worker's half of restoring values on parameter servers: the worker tells each server its part.

Runs while no other worker does anything. The driver restores what a worker cannot describe to servers: a module with
more in its state than variables, an optimizer with tensors among its options.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import nn

from raydist.actors.portable_errors import pack_error
from raydist.checkpoints.differences import Difference, state_differences, tensor_named
from raydist.checkpoints.entries import names_of_tensors, pack_state, unpack_state
from raydist.checkpoints.manifest import SavedObject
from raydist.checkpoints.optimizer_names import GROUPS, fitting_entries, parameter_names
from raydist.checkpoints.restoring.compared_objects import differences_of, refused
from raydist.checkpoints.saved_checkpoint import SavedCheckpoint
from raydist.checkpoints.saved_kinds import kind_of_state, state_of
from raydist.checkpoints.sharing.restore_orders import RestoreOrders, StoredMemory
from raydist.checkpoints.sharing.restore_request import PreparedShare, RestoreRequest
from raydist.checkpoints.sharing.served_share import SliceDirectory
from raydist.checkpoints.sharing.stored_memories import taken_options
from raydist.parameter_servers.requests import BeginRestore
from raydist.parameter_servers.rows.sharded_embedding import SavedRows, require_known
from raydist.parameter_servers.slices import ServedSlice
from raydist.parameter_servers.worker.client import Ask

__all__ = ["BegunRestore", "ServedRestores", "begin_served_restore", "follow_driver"]

OptionGroups = Sequence[Mapping[str, Any]]


@final
@dataclass(frozen=True, slots=True)
class BegunRestore:
    """A worker's report on a restore that servers have begun. If something does not fit, nothing was begun.

    Attributes:
        share: Differences by name, for the objects that servers restore.
        options: Options of the parameter groups, by name of the optimizer.
    """

    share: PreparedShare
    options: Mapping[str, OptionGroups] = field(default_factory=dict)


@final
class ServedRestores:
    """The restores that a worker starts. Used by the worker's single thread.

    Args:
        held: The worker's view of the servers.
    """

    def __init__(self, held: SliceDirectory) -> None:
        self._held = held

    def begin(
        self, request: RestoreRequest, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]
    ) -> BegunRestore:
        """Compare objects; if all fit, make every server begin to read its part. Blocks until the servers have begun.

        Args:
            request: The restore.
            objects: The objects to restore, as they are on the worker, where optimizers have no state.
            modules: Modules that name the parameters of optimizers.

        Raises:
            DataLossError: A saved entry is not a valid state.
            InvalidArgumentError: The rows belong to other tables, or an optimizer does not accept the options.
        """
        differences = {name: _differences(name, obj, modules, request) for name, obj in objects.items()}
        if any(refused(found, request.strict) for found in differences.values()):
            return BegunRestore(PreparedShare(differences))
        for name, obj in objects.items():
            _require_state(obj, request.checkpoint, request.saved[name])
        orders = RestoreOrders(request, self._held.num_servers)
        begun = _Begun(orders, request, modules, self._held)
        served = [name for name, obj in objects.items() if begun.add(name, obj)]
        if served:
            asks = {server: Ask(BeginRestore(orders.of(server))) for server in range(self._held.num_servers)}
            self._held.exchange(asks)
        return BegunRestore(PreparedShare({name: differences[name] for name in served}), begun.options)


def _differences(
    name: str, obj: Any, modules: Mapping[str, nn.Module], request: RestoreRequest
) -> tuple[Difference, ...]:
    """Return the differences of one object; only the kind for rows, and no optimizer state."""
    saved = request.saved[name]
    if not isinstance(obj, SavedRows):
        return tuple(differences_of(name, obj, modules, request.checkpoint, saved))
    here, there = SavedObject(kind_of_state(obj), values={}), request.checkpoint.saved(saved)
    return tuple(state_differences(name, here, {}, there, request.checkpoint.places(saved)))


def _require_state(obj: Any, checkpoint: SavedCheckpoint, saved: str) -> None:
    """Require that the saved entry is a state, and that rows belong to the tables of `obj`."""
    checkpoint.require_state(saved)
    if not isinstance(obj, SavedRows):
        return
    values = checkpoint.saved(saved).values
    if not isinstance(values, dict):
        raise checkpoint.loss(f"the state of {saved!r} is none: it has no tables")
    require_known(values, obj.tables())


@final
class _Begun:
    """The orders of one restore while they are being built.

    Attributes:
        options: See `BegunRestore`.
    """

    def __init__(
        self,
        orders: RestoreOrders,
        request: RestoreRequest,
        modules: Mapping[str, nn.Module],
        held: SliceDirectory,
    ) -> None:
        self._orders, self._request, self._modules, self._held = orders, request, modules, held
        self.options: dict[str, OptionGroups] = {}

    def add(self, name: str, obj: Any) -> bool:
        """Let servers restore an object; return False if they cannot."""
        values = self._request.checkpoint.saved(self._request.saved[name]).values
        if isinstance(obj, SavedRows):
            tables = obj.tables()
            self._orders.add_rows(name, {path: self._held.handle_of(table.weight) for path, table in tables.items()})
            return True
        if kind_of_state(obj) == "optimizer":
            return self._add_optimizer(name, obj, values)
        return isinstance(values, dict) and self._add_module(name, obj, values)

    def _add_module(self, name: str, module: nn.Module, saved: Mapping[str, Any]) -> bool:
        here = pack_state(state_of(module, {}), name)
        both = {key: (tensor_named(here.values[key]), tensor_named(saved[key])) for key in here.values if key in saved}
        tensors = {ours: torch.as_tensor(here.tensors[ours]) for ours, _ in both.values() if ours is not None}
        places = self._held.places(tensors)
        if None in {theirs for _, theirs in both.values()} or any(
            tensor.numel() and key not in places for key, tensor in tensors.items()
        ):
            return False
        self._orders.add_values(name, [(str(theirs), places[ours]) for ours, theirs in both.values() if ours in places])
        return True

    def _add_optimizer(self, name: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> bool:
        names = parameter_names(optimizer, self._modules)
        if next(names_of_tensors(saved[GROUPS]), None) is not None:
            return False
        entries = unpack_state({GROUPS: saved[GROUPS]}, {})
        self.options[name] = taken_options(name, optimizer, self._groups(entries, optimizer, names))
        homes = {each: group for group in entries[GROUPS] for each in group["params"]}
        parameters = dict(zip(names, _parameters(optimizer), strict=True))
        self._orders.begin_memories(name)
        for each, parts in self._held.places(parameters).items():
            if each in homes:  # otherwise the parameter keeps its state
                told = parameters[each].shape, saved.get(each), homes[each]
                for part in parts:
                    self._remember(name, optimizer, each, part, *told)
        return True

    def _groups(
        self, entries: Mapping[str, Any], optimizer: torch.optim.Optimizer, names: Sequence[str]
    ) -> OptionGroups:
        found: OptionGroups = entries[GROUPS]
        if self._request.strict:
            return found
        left = iter(names)
        here = [{**group, "params": [next(left) for _ in group["params"]]} for group in optimizer.param_groups]
        fitting: OptionGroups = fitting_entries({GROUPS: found}, {GROUPS: here})[GROUPS]
        return fitting

    def _remember(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        parameter: str,
        part: ServedSlice,
        shape: Sequence[int],
        entry: Any,
        group: Mapping[str, Any],
    ) -> None:
        options = {key: value for key, value in group.items() if key != "params"}
        handle, saved = self._held.handle_of(optimizer), self._request.saved[name]
        memory = StoredMemory(name, handle, part.number, saved, parameter, tuple(shape), part.begin, entry, options)
        self._orders.add_memory(part, memory)


def _parameters(optimizer: torch.optim.Optimizer) -> Sequence[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def begin_served_restore(
    restores: ServedRestores, request: RestoreRequest, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]
) -> bytes:
    """Begin a restore on a worker while no other runs anything; return a pickled `BegunRestore` or `PortableError`."""
    try:
        return pickle.dumps(restores.begin(request, objects, modules))
    except Exception as error:
        return pickle.dumps(pack_error(error))


def follow_driver(restores: ServedRestores) -> None:
    """Do nothing: running this function makes the worker send the driver's changes before servers take their values."""
