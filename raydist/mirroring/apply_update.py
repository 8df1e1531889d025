"""Apply a payload of the driver on a replica, and collect the attributes that steps changed for the driver.

A step may replace a buffer: `self.mean = 0.9 * self.mean + ...` leaves a tensor without a handle, which no other
replica could take over. The program means a new value, so the mirrored buffer gets that value and its place again.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch

from raydist.collectives.reducer.parameter_hooks import ParameterHooks, detach_hooks
from raydist.compat.torch_internals import buffer_table
from raydist.core.errors import FailedPreconditionError
from raydist.mirroring.aggregation import Aggregations, share_of
from raydist.mirroring.handles import ReplicaTable
from raydist.mirroring.lazy_states import divide_states, restore_states, state_names
from raydist.mirroring.messages import StepPayload, Writes, overwrite
from raydist.mirroring.object_kinds import capture_object, content_digest, patch_object
from raydist.pickling.attribute_table import AttributePath, AttributeTable, attributes, changed, seal
from raydist.pickling.pickler import HandleUnpickler, PersistentId, dumps, loads
from raydist.utils.sharded_tensors import SHARDED, is_sharded, shard_like, shard_state
from raydist.utils.stage_tensors import Placeholder


@final
class ReplicaBuffers:
    """The mirrored buffers of one replica.

    Attributes:
        aggregations: The rules that combine the values of all replicas.
    """

    def __init__(self, table: ReplicaTable, rank: int, world_size: int) -> None:
        self._table = table
        self._rank = rank
        self._world_size = world_size
        self._places: dict[int, list[tuple[str, torch.Tensor]]] = {}  # names and buffers, by the module's handle
        self.aggregations = Aggregations()

    def note_places(self, handle: int) -> None:
        """Record the buffers that this object has, if it is a module, because driver and replica agree on them now."""
        module = self._table.object_of(handle)
        if isinstance(module, torch.nn.Module):
            held = buffer_table(module)
            mirrored = [(name, tensor) for name, tensor in held.items() if self._table.handle_of(tensor) is not None]
            self._places[handle] = mirrored

    def settle(self) -> None:
        """Give buffers that a step replaced the new values, and register them in their modules again."""
        for handle, places in self._places.items():
            held = buffer_table(self._table.object_of(handle))
            for name, tensor in places:
                now = held.get(name)
                if now is not tensor and isinstance(now, torch.Tensor) and self._is_new_value(tensor, now):
                    overwrite(tensor, now.detach())
                    held[name] = tensor

    def _is_new_value(self, tensor: torch.Tensor, now: torch.Tensor) -> bool:
        """Return False if another module keeps the old tensor, or if the new one is mirrored as well, or sparse."""
        if self._table.handle_of(now) is not None or {now.layout, tensor.layout} != {torch.strided}:
            return False
        uses = Counter(id(known) for places in self._places.values() for _, known in places)
        return uses[id(tensor)] == 1

    def forget(self, handle: int) -> None:
        """Drop the records of an object that the driver has dropped."""
        self._places.pop(handle, None)
        self.aggregations.forget(handle)

    def items(self) -> list[tuple[int, torch.Tensor]]:
        """Return handles and buffers, in an order that is the same on all replicas."""
        self.settle()
        tensors = [(handle, obj) for handle, obj in self._table.items() if isinstance(obj, torch.Tensor)]
        return [(handle, tensor) for handle, tensor in tensors if not isinstance(tensor, torch.nn.Parameter)]

    def take_over(self, values: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> None:
        """Set the buffers to another replica's values of `items()`.

        Where the shares of replicas add up, set this replica's own earlier values; if `own` is empty, take all values.
        """
        for index, (handle, buffer) in enumerate(self.items()):
            keeps = own and self.aggregations.of(handle, buffer).is_divided
            overwrite(buffer, own[index] if keeps else values[index])

    def written(self) -> list[tuple[torch.Tensor, str]]:
        """Return the buffers that replicas agree on after each batch, each with the rule; in the order of `items`."""
        written = self.aggregations.written()
        if not written:
            return []
        self.settle()
        return [(self._table.object_of(handle), how) for handle, how in written]

    def arrived(self, handles: Iterable[int]) -> None:
        """Keep this replica's share of the values that the driver sent whole."""
        objects = [(handle, self._table.object_of(handle)) for handle in dict.fromkeys(handles)]
        if any(isinstance(obj, torch.nn.Module | torch.Tensor) for _, obj in objects):
            self.update_aggregations()
        for handle, obj in objects:
            if isinstance(obj, torch.Tensor) and self.aggregations.of(handle, obj).is_divided:
                overwrite(obj, share_of(obj, self._rank, self._world_size))

    def update_aggregations(self) -> None:
        """Read the aggregations from the modules again."""
        self.aggregations.update(self._table.items(), self._table.handle_of)

    def own(self) -> dict[int, torch.Tensor]:
        """Return the buffers that each replica computes from its own rows."""
        return {handle: obj for handle, obj in self.items() if self.aggregations.of(handle, obj).is_gathered}

    def restore_own(self, handle: int, values: Mapping[int, Any]) -> None:
        """Set a buffer to its value among the own ones; a new replica has no share yet of values that add up."""
        tensor = self._table.object_of(handle)
        if handle in values:
            overwrite(tensor, values[handle])
        elif self.aggregations.of(handle, tensor).is_divided:
            overwrite(tensor, torch.zeros_like(tensor))


@final
class ControlCollector:
    """The collector of control state (attributes, `requires_grad` flags) that the driver does not know yet."""

    def __init__(self, table: ReplicaTable, identify: Callable[[Any], PersistentId | None]) -> None:
        self._table = table
        self._identify = identify
        self._digest = content_digest(table.handle_of)
        self._known: dict[int, AttributeTable] = {}
        self._flags: dict[int, bool] = {}

    def mark_known(self, handle: int) -> None:
        """Record that the driver knows the present attributes of an object, or the flag of a tensor."""
        obj = self._table.object_of(handle)
        if isinstance(obj, torch.Tensor):
            self._flags[handle] = obj.requires_grad
        else:
            self._known[handle] = seal(capture_object(obj, self._digest))

    def forget_known(self) -> None:
        """Make the next collection contain everything."""
        self._known.clear()
        self._flags.clear()

    def collect(self, *, modules: bool) -> bytes:
        """Return the pickle of (changes by handle, `requires_grad` flags by handle)."""
        changes: dict[int, dict[AttributePath, Any]] = {}
        flags: dict[int, bool] = {}
        for handle, obj in self._table.items():
            if isinstance(obj, torch.Tensor):
                if modules and self._flags.get(handle) is not obj.requires_grad:
                    flags[handle] = self._flags[handle] = obj.requires_grad
            elif isinstance(obj, torch.nn.Module) is modules or isinstance(obj, torch.Generator):
                now = capture_object(obj, self._digest)
                if values := changed(self._known.get(handle, {}), now):
                    changes[handle] = values
                    self._known[handle] = seal(now)
        return dumps((changes, flags), self._identify)


@final
class UpdateApplier:
    """Applies payloads, in their order.

    `resolve` returns the object of a persistent id in a payload; `states_for_rank` returns this replica's states of a
    metric from those that the driver sent to all replicas; `watch` is called with each new optimizer; `prepare` returns
    new objects with sharded parameters in the place of whole ones.

    Attributes:
        num_gradients_set: Number of gradients that the driver has set or cleared so far.
    """

    def __init__(
        self,
        table: ReplicaTable,
        buffers: ReplicaBuffers,
        control: ControlCollector,
        *,
        resolve: Callable[[PersistentId], Any],
        states_for_rank: Callable[[Any, tuple[dict[str, Any], dict[str, Any]]], dict[str, Any]],
        watch: Callable[[torch.optim.Optimizer], None],
        prepare: Callable[[Sequence[tuple[int, Any]]], Sequence[tuple[int, Any]]] = lambda items: items,
    ) -> None:
        self._table = table
        self._buffers = buffers
        self._control = control
        self._resolve = resolve
        self._states_for_rank = states_for_rank
        self._watch = watch
        self._prepare = prepare
        self._loaded_states: set[int] = set()
        self.num_gradients_set = 0

    def take(self, payload: StepPayload) -> None:
        """Drop released objects, add new ones, and apply the driver's writes."""
        for handle in payload.released:
            self._table.release(handle)
            self._buffers.forget(handle)
        arrived = self._load_bundle(payload.bundle) if payload.bundle else []
        if payload.writes:
            arrived += self._write(loads(payload.writes, self._resolve))
        if arrived:
            self._buffers.arrived(arrived)

    def take_loaded_states(self) -> frozenset[int]:
        """Return the handles of optimizers whose state the driver has replaced since the last call."""
        loaded, self._loaded_states = frozenset(self._loaded_states), set()
        return loaded

    def _load_bundle(self, bundle: bytes) -> list[int]:
        """Add new objects; return their handles."""
        unpickler = HandleUnpickler(io.BytesIO(bundle), self._resolve)
        unpickler.load()  # the roots; the list behind the hooks has all objects that they lead to
        hooks = list(iter(unpickler.load, None))
        found = unpickler.load()
        self.add(found, hooks, unpickler.load())
        for handle, obj in found:
            if state_names(obj):
                # Updates made by the driver count once.
                restore_states(obj, self._states_for_rank(obj, divide_states(obj)))
            self._control.mark_known(handle)
        return [handle for handle, _ in found]

    def add(
        self,
        items: Sequence[tuple[int, Any]],
        hooks: Sequence[tuple[int, ParameterHooks]],
        gradients: Mapping[int, torch.Tensor],
    ) -> None:
        """Register objects under their handles, and the program's hooks and gradients on their parameters."""
        items = self._prepare(items)
        for handle, obj in items:
            self._table.add(handle, obj)
            if isinstance(obj, torch.optim.Optimizer):
                self._watch(obj)
        for handle, _ in items:
            self._buffers.note_places(handle)
        for handle, found in hooks:
            _require_whole(self._table.object_of(handle))
            found.attach(self._table.object_of(handle))
        self.set_gradients(gradients)

    def _write(self, writes: Writes) -> list[int]:
        """Apply the driver's changes; return the handles of the tensors and objects that it changed."""
        self._buffers.settle()
        for handle, values in writes.tensors.items():
            overwrite(self._table.object_of(handle), values)
        self.set_gradients(dict.fromkeys(writes.cleared_gradients))
        self.set_gradients(writes.gradients)
        for handle, (removed, added) in writes.hooks.items():
            detach_hooks(self._table.object_of(handle), removed)
            _require_whole(self._table.object_of(handle))
            added.attach(self._table.object_of(handle))
        for handle, flag in writes.requires_grad.items():
            self._table.object_of(handle).requires_grad_(flag)
        for handle, changes in writes.control.items():
            _require_no_hooks(self._table.object_of(handle), changes)
            patch_object(self._table.object_of(handle), changes)
            self._buffers.note_places(handle)
        for handle, state in writes.optimizer_states.items():
            self._loaded_states.add(handle)
            held = attributes(self._table.object_of(handle))["state"]
            held.clear()
            held.update({key: shard_state(entries, key) for key, entries in state.items()})
        for handle, states in writes.metrics.items():
            metric = self._table.object_of(handle)
            restore_states(metric, self._states_for_rank(metric, states))
        written = [*writes.tensors, *writes.control]
        for handle in (*written, *writes.requires_grad):
            self._control.mark_known(handle)
        return written

    def set_gradients(self, gradients: Mapping[int, torch.Tensor | None]) -> None:
        """Set the gradients of parameters by handle."""
        self.num_gradients_set += len(gradients)
        for handle, gradient in gradients.items():
            parameter = self._table.object_of(handle)
            mine = None if gradient is None else shard_like(gradient.clone().to(parameter.device), parameter)
            parameter.grad = None if isinstance(mine, Placeholder) else mine  # optimizers leave these parameters out


def _require_no_hooks(obj: Any, changes: Mapping[AttributePath, Any]) -> None:
    if (
        isinstance(obj, torch.nn.Module)
        and SHARDED in attributes(obj)
        and any(str(path[0]).endswith("_hooks") for path in changes)
    ):
        raise FailedPreconditionError(
            f"The hooks of a sharded module must be there before its first step, but the program has changed those of "
            f"a {type(obj).__name__} after it."
        )


def _require_whole(parameter: torch.nn.Parameter) -> None:
    if is_sharded(parameter):
        raise FailedPreconditionError(
            f"A hook on a parameter needs its whole gradient, which no replica has for a sharded parameter of shape "
            f"{tuple(parameter.shape)}. Remove the hook, or change the gradients after backward()."
        )
