"""Copies of a replica that holds parts of modules: its parts, and the objects as they came from the driver.

A sharded module has hooks and process groups of its own process, so it cannot be pickled. The replica keeps a blueprint
of new objects before it shards them: their pickle, without the values of parameters. A copy of its state has the
blueprints, what has changed since, and this replica's parts of all tensors. A new replica shards the objects of the
blueprints as the first one did, and then takes over the rest. No tensor is gathered.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from raydist.collectives.reducer.parameter_hooks import ParameterHooks
from raydist.mirroring.handles import ReplicaTable
from raydist.mirroring.messages import TensorImage, overwrite
from raydist.mirroring.object_kinds import capture_object, content_digest, patch_object
from raydist.pickling.attribute_table import AttributePath, AttributeTable, attributes, changed, seal
from raydist.pickling.pickler import PersistentId, dumps, loads
from raydist.sharding.initial_values import INITIAL_VALUES, NO_VALUES, is_on_meta
from raydist.sharding.units import find_roots
from raydist.utils.sharded_tensors import SHARDED, STAGES, is_sharded
from raydist.utils.stage_tensors import Placeholder

Items = Sequence[tuple[int, Any]]
"""Handles and objects."""


@final
@dataclass(frozen=True, slots=True)
class Blueprint:
    """New objects as they came from the driver, without the values of tensors.

    Attributes:
        tensors: Parameters and buffers by handle, on the device "meta".
        real: Handles of the tensors that get memory before modules are sharded: those outside of modules, and buffers.
        uses: Handles of earlier objects that the new ones refer to.
        handles: Handles of the new objects that are no tensors.
        pickled: Pickle of these objects with their handles.
    """

    tensors: Mapping[int, torch.Tensor]
    real: frozenset[int]
    uses: frozenset[int]
    handles: frozenset[int]
    pickled: bytes

    @staticmethod
    def of(items: Items, handle_of: Callable[[Any], int | None]) -> Blueprint:
        """Return the blueprint of new objects; `handle_of` returns the handle of an earlier object."""
        tensors = {handle: obj for handle, obj in items if isinstance(obj, torch.Tensor)}
        others = [(handle, obj) for handle, obj in items if handle not in tensors]
        roots = find_roots([obj for _, obj in others if isinstance(obj, nn.Module)])
        in_modules = {id(parameter) for root in roots for parameter in root.parameters()}
        known = {id(obj): handle for handle, obj in tensors.items()}
        uses: set[int] = set()

        def identify(obj: Any) -> PersistentId | None:
            handle = known.get(id(obj))
            if handle is None and (handle := handle_of(obj)) is not None:
                uses.add(handle)
            return None if handle is None else ("object", handle)

        with _without_states([obj for _, obj in others]):
            pickled = dumps(others, identify, to_replica=True)
        return Blueprint(
            {handle: _empty_like(each, torch.device("meta")) for handle, each in tensors.items()},
            frozenset(handle for handle, each in tensors.items() if id(each) not in in_modules),
            frozenset(uses),
            frozenset(handle for handle, _ in others),
            pickled,
        )

    def objects(self, resolve: Callable[[PersistentId], Any], device: torch.device) -> list[tuple[int, Any]]:
        """Make the objects; those without values get none when they are sharded, but memory."""
        tensors = {
            handle: _empty_like(each, device) if handle in self.real else each for handle, each in self.tensors.items()
        }
        others = loads(self.pickled, lambda pid: tensors[pid[1]] if pid[1:] and pid[1] in tensors else resolve(pid))
        for root in find_roots([obj for _, obj in others if isinstance(obj, nn.Module)]):
            if is_on_meta(root):
                vars(root)[INITIAL_VALUES] = NO_VALUES
        return [*tensors.items(), *others]


def _empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    empty = torch.empty_like(tensor.detach(), device=device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


@contextlib.contextmanager
def _without_states(objects: Sequence[Any]) -> Iterator[None]:
    """Take the states of optimizers away, which have whole tensors before the parameters are sharded."""
    held = {id(obj): attributes(obj) for obj in objects if isinstance(obj, torch.optim.Optimizer)}
    states = {key: each["state"] for key, each in held.items()}
    try:
        for each in held.values():
            each["state"] = defaultdict(dict)
        yield
    finally:
        for key, each in held.items():
            each["state"] = states[key]


@final
@dataclass(frozen=True, slots=True)
class TensorPart:
    """This replica's part of a tensor; all of a tensor that is not sharded.

    Attributes:
        image: The values.
        layout: Placements, shape and stride of the sharded tensor; None if it is not sharded.
        on_host: The values are in host memory.
    """

    image: TensorImage
    layout: tuple[Any, torch.Size, tuple[int, ...]] | None
    on_host: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorPart:
        """Return the part. It shares the memory of a tensor on the CPU."""
        found: Any = tensor.detach()
        local = found.to_local() if is_sharded(found) else found
        layout = (tuple(found.placements), found.shape, found.stride()) if is_sharded(found) else None
        return TensorPart(TensorImage.of(local), layout, local.device.type == "cpu")

    def write(self, tensor: torch.Tensor) -> None:
        """Give a tensor these values; a sharded one is divided like that of the copy."""
        target: Any = tensor.detach()
        if is_sharded(target):
            target.to_local().copy_(self.image.tensor())
        else:
            overwrite(tensor, self.image.tensor())

    def tensor(self, like: Any, device: torch.device) -> torch.Tensor:
        """Make the tensor, on the mesh of a sharded parameter."""
        local = self.image.tensor()
        local = local if self.on_host else local.to(device)
        if self.layout is None:
            return local
        from torch.distributed.tensor import DTensor  # it was imported when `like` was made

        placements, shape, stride = self.layout
        return DTensor.from_local(local, like.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def _parts_in(value: Any) -> Any:
    """Return an optimizer's state with parts in the place of tensors."""
    if isinstance(value, torch.Tensor):
        return TensorPart.of(value)
    if isinstance(value, dict):
        return {key: _parts_in(each) for key, each in value.items()}
    return [_parts_in(each) for each in value] if isinstance(value, list) else value


def _with_tensors(value: Any, like: Any, device: torch.device) -> Any:
    if isinstance(value, TensorPart):
        return value.tensor(like, device)
    if isinstance(value, dict):
        return {key: _with_tensors(each, like, device) for key, each in value.items()}
    return [_with_tensors(each, like, device) for each in value] if isinstance(value, list) else value


@final
@dataclass(frozen=True, slots=True)
class StateOfParts:
    """The state of a replica that holds parts of modules.

    Attributes:
        blueprints: The objects, in the order in which they came.
        handles: The objects that the program still has.
        changes: Pickle of the attributes that changed since the objects came, the `requires_grad` flags, and the hooks
            on parameters, by handle.
        tensors: Values of parameters and buffers by handle.
        gradients: Gradients of parameters by handle.
        states: States of optimizers by handle: by the handle of the parameter.
    """

    blueprints: tuple[Blueprint, ...]
    handles: frozenset[int]
    changes: bytes
    tensors: Mapping[int, TensorPart]
    gradients: Mapping[int, TensorPart]
    states: Mapping[int, list[tuple[int, Any]]]


@final
class Blueprints:
    """The blueprints of one replica's objects.

    Args:
        table: The objects by handle.
        identify: Returns the persistent id of an object of the table.
        resolve: Returns the object of a persistent id.
        device: The device of the replica.
    """

    def __init__(
        self,
        table: ReplicaTable,
        identify: Callable[[Any], PersistentId | None],
        resolve: Callable[[PersistentId], Any],
        device: torch.device,
    ) -> None:
        self._table = table
        self._identify = identify
        self._resolve = resolve
        self._device = device
        self._digest = content_digest(table.handle_of)
        self._blueprints: list[Blueprint] = []
        self._first: dict[int, AttributeTable] = {}  # attributes of objects when these had come

    def note(self, items: Items) -> None:
        """Keep a blueprint of new objects that are not sharded yet."""
        self._blueprints.append(Blueprint.of(items, self._table.handle_of))

    def note_arrived(self) -> None:
        """Keep the attributes of new objects that are sharded and in the table now."""
        for handle, obj in self._others():
            if handle not in self._first:
                self._first[handle] = seal(self._attributes(obj))

    def _others(self) -> list[tuple[int, Any]]:
        return [(handle, obj) for handle, obj in self._table.items() if not isinstance(obj, torch.Tensor)]

    def _attributes(self, obj: Any) -> AttributeTable:
        """Return the attributes of an object, without those of a divided module that dividing makes again."""
        found = capture_object(obj, self._digest)
        if isinstance(obj, nn.Module) and SHARDED in attributes(obj):
            made = (STAGES, "forward") if STAGES in attributes(obj) else ()
            kept = (path for path in found if path[0] not in made and not str(path[0]).endswith("_hooks"))
            return {path: found[path] for path in kept}
        return found

    def copy(self) -> StateOfParts:
        """Return the state of this replica; it shares the memory of tensors on the CPU."""
        items = self._table.items()
        tensors = {handle: obj for handle, obj in items if isinstance(obj, torch.Tensor)}
        parameters = {handle: obj for handle, obj in tensors.items() if isinstance(obj, nn.Parameter)}
        optimizers = [(handle, obj) for handle, obj in items if isinstance(obj, torch.optim.Optimizer)]
        alive = frozenset(handle for handle, _ in items)
        self._drop_unused(alive)
        return StateOfParts(
            tuple(self._blueprints),
            alive,
            dumps((self._changes(), self._flags(tensors), self._hooks(parameters)), self._identify, to_replica=True),
            {handle: TensorPart.of(each) for handle, each in tensors.items() if not isinstance(each, Placeholder)},
            {handle: TensorPart.of(each.grad) for handle, each in parameters.items() if each.grad is not None},
            {handle: self._state_of(each) for handle, each in optimizers},
        )

    def _drop_unused(self, alive: frozenset[int]) -> None:
        """Drop the blueprints of objects that are gone, unless later ones refer to them."""
        needed, kept = set(alive), []
        for each in reversed(self._blueprints):
            if needed & (each.handles | each.tensors.keys()):
                needed |= each.uses
                kept.append(each)
        self._blueprints = kept[::-1]
        self._first = {handle: each for handle, each in self._first.items() if handle in alive}

    def _changes(self) -> dict[int, dict[AttributePath, Any]]:
        changes = (
            (handle, changed(self._first.get(handle, {}), self._attributes(obj))) for handle, obj in self._others()
        )
        return {handle: each for handle, each in changes if each}

    def _flags(self, tensors: Mapping[int, torch.Tensor]) -> dict[int, bool]:
        return {handle: each.requires_grad for handle, each in tensors.items()}

    def _hooks(self, parameters: Mapping[int, nn.Parameter]) -> list[tuple[int, ParameterHooks]]:
        return [(handle, found) for handle, each in parameters.items() if (found := ParameterHooks.of(each))]

    def _state_of(self, optimizer: torch.optim.Optimizer) -> list[tuple[int, Any]]:
        held = attributes(optimizer)["state"]
        found = ((self._table.handle_of(parameter), state) for parameter, state in held.items())
        return [(handle, _parts_in(state)) for handle, state in found if handle is not None]

    def load(self, copy: StateOfParts, add: Callable[[Items], None]) -> None:
        """Make the objects of a copy, and give them its values; `add` shards new objects and adds them to the table."""
        for blueprint in copy.blueprints:
            add(blueprint.objects(self._resolve, self._device))
            self.note_arrived()
        changes, flags, hooks = loads(copy.changes, self._resolve)
        for handle, flag in flags.items():
            self._table.object_of(handle).requires_grad_(flag)
        for handle, values in changes.items():
            patch_object(self._table.object_of(handle), values)
        for handle, found in hooks:
            found.attach(self._table.object_of(handle))
        self._load_tensors(copy)

    def _load_tensors(self, copy: StateOfParts) -> None:
        for handle, part in copy.tensors.items():
            part.write(self._table.object_of(handle))
        for handle, part in copy.gradients.items():
            parameter = self._table.object_of(handle)
            parameter.grad = part.tensor(parameter, self._device)
        for handle, states in copy.states.items():
            held = attributes(self._table.object_of(handle))["state"]
            for key, state in states:
                parameter = self._table.object_of(key)
                held[parameter] = _with_tensors(state, parameter, self._device)
