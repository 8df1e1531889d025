"""Apply a shipment of the driver on a replica, and collect the attributes that steps changed for the driver."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch

from raydist.collectives.reducer.parameter_hooks import ParameterHooks, detach_hooks
from raydist.mirroring.handles import ReplicaTable
from raydist.mirroring.messages import Shipment, Writes, overwrite
from raydist.mirroring.metric_states import divide_states, restore_states, state_names
from raydist.mirroring.object_kinds import capture_object, content_digest, patch_object
from raydist.mirroring.on_replica.buffers import ReplicaBuffers
from raydist.pickling.attribute_table import AttributePath, AttributeTable, attributes, changed, seal
from raydist.pickling.pickler import HandleUnpickler, PersistentId, dumps, loads

__all__ = ["UpdateApplier", "ControlCollector"]


@final
class ControlCollector:
    """The attributes and `requires_grad` flags that the driver knows, compared with the present ones."""

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
    """Applies shipments, in their order.

    Args:
        table: The replica's objects.
        buffers: The replica's buffers.
        control: The attributes that the driver knows.
        resolve: Returns the object of a persistent id in a shipment.
        share: Returns a replica's share of the states of a metric that the driver sent to all replicas.
        watch: Called with each new optimizer.

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
        share: Callable[[Any, tuple[dict[str, Any], dict[str, Any]]], dict[str, Any]],
        watch: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        self._table = table
        self._buffers = buffers
        self._control = control
        self._resolve = resolve
        self._share = share
        self._watch = watch
        self._loaded_states: set[int] = set()
        self.num_gradients_set = 0

    def take(self, shipment: Shipment) -> None:
        """Drop released objects, add new ones, and apply the driver's writes."""
        for handle in shipment.released:
            self._table.release(handle)
            self._buffers.forget(handle)
        arrived = self._load_bundle(shipment.bundle) if shipment.bundle else []
        if shipment.writes:
            arrived += self._write(loads(shipment.writes, self._resolve))
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
                restore_states(obj, self._share(obj, divide_states(obj)))  # updates made by the driver count once
            self._control.mark_known(handle)
        return [handle for handle, _ in found]

    def add(
        self,
        items: Sequence[tuple[int, Any]],
        hooks: Sequence[tuple[int, ParameterHooks]],
        gradients: Mapping[int, torch.Tensor],
    ) -> None:
        """Register objects under their handles, and the program's hooks and gradients on their parameters."""
        for handle, obj in items:
            self._table.add(handle, obj)
            if isinstance(obj, torch.optim.Optimizer):
                self._watch(obj)
        for handle, _ in items:
            self._buffers.note_places(handle)
        for handle, found in hooks:
            found.attach(self._table.object_of(handle))
        self._set_gradients(gradients)

    def _write(self, writes: Writes) -> list[int]:
        """Apply the driver's changes; return the handles of the tensors and objects that it changed."""
        self._buffers.settle()
        for handle, values in writes.tensors.items():
            overwrite(self._table.object_of(handle), values)
        self._set_gradients(dict.fromkeys(writes.cleared_gradients))
        self._set_gradients(writes.gradients)
        for handle, (removed, added) in writes.hooks.items():
            detach_hooks(self._table.object_of(handle), removed)
            added.attach(self._table.object_of(handle))
        for handle, flag in writes.requires_grad.items():
            self._table.object_of(handle).requires_grad_(flag)
        for handle, changes in writes.control.items():
            patch_object(self._table.object_of(handle), changes)
            self._buffers.note_places(handle)
        for handle, state in writes.optimizer_states.items():
            self._loaded_states.add(handle)
            held = attributes(self._table.object_of(handle))["state"]
            held.clear()
            held.update(state)
        for handle, states in writes.metrics.items():
            metric = self._table.object_of(handle)
            restore_states(metric, self._share(metric, states))
        written = [*writes.tensors, *writes.control]
        for handle in (*written, *writes.requires_grad):
            self._control.mark_known(handle)
        return written

    def _set_gradients(self, gradients: Mapping[int, torch.Tensor | None]) -> None:
        self.num_gradients_set += len(gradients)
        for handle, gradient in gradients.items():
            parameter = self._table.object_of(handle)
            parameter.grad = None if gradient is None else gradient.clone().to(parameter.device)
