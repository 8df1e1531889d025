"""TODO."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch

from raydist.collectives.reducer.parameter_hooks import ParameterHooks
from raydist.mirroring.handles import ReplicaTable
from raydist.mirroring.messages import Shipment, Writes, overwrite
from raydist.mirroring.metric_states import divide_states, restore_states, state_names
from raydist.mirroring.object_kinds import capture_object, content_digest, patch_object
from raydist.mirroring.on_replica.buffers import ReplicaBuffers
from raydist.pickling.attribute_table import AttributePath, AttributeTable, attributes, changed, seal
from raydist.pickling.pickler import HandleUnpickler, PersistentId, dumps, loads

__all__ = ["Arrivals", "ControlCollector"]


@final
class ControlCollector:
    """Compares control states with those that the driver knows."""

    def __init__(self, table: ReplicaTable, identify: Callable[[Any], PersistentId | None]) -> None:
        self._table = table
        self._identify = identify
        self._digest = content_digest(table.handle_of)
        self._known: dict[int, AttributeTable] = {}
        self._flags: dict[int, bool] = {}

    def mark_known(self, handle: int) -> None:
        """The driver knows the present state of this object."""
        self._known[handle] = seal(self._capture(handle))

    def mark_flag_known(self, handle: int) -> None:
        """The driver knows the present `requires_grad` of this tensor."""
        self._flags[handle] = self._table.object_of(handle).requires_grad

    def forget_known(self) -> None:
        """The driver knows nothing."""
        self._known.clear()
        self._flags.clear()

    def collect(self, *, modules: bool) -> bytes:
        """Pickle of (changes by handle, `requires_grad` flags by handle)."""
        changes: dict[int, dict[AttributePath, Any]] = {}
        flags: dict[int, bool] = {}
        for handle, obj in self._table.items():
            if isinstance(obj, torch.Tensor):
                if modules and self._flags.get(handle) is not obj.requires_grad:
                    flags[handle] = self._flags[handle] = obj.requires_grad
            elif isinstance(obj, torch.nn.Module) is modules or isinstance(obj, torch.Generator):
                self._collect_one(handle, changes)
        return dumps((changes, flags), self._identify)

    def _collect_one(self, handle: int, changes: dict[int, dict[AttributePath, Any]]) -> None:
        now = self._capture(handle)
        values = changed(self._known.get(handle, {}), now)
        if values:
            changes[handle] = values
            self._known[handle] = seal(now)

    def _capture(self, handle: int) -> AttributeTable:
        return capture_object(self._table.object_of(handle), self._digest)


@final
class Arrivals:
    """Takes it in, in the order of shipments.

    Args:
        table: The replica's objects.
        buffers: Those of them that are buffers.
        control: What the driver knows of attributes.
        resolve: What a persistent id in a shipment stands for.
        share: A replica's share of the states of a metric that are the driver's and all replicas'.
        watch: Given each optimizer that is new.

    Attributes:
        num_gradients_set: Gradients that the driver has set or cleared so far.
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
        """Forget what was released, take in what is new, and do what the driver has written."""
        for handle in shipment.released:
            self._table.release(handle)
            self._buffers.forget(handle)
        arrived = self._load_bundle(shipment.bundle) if shipment.bundle else []
        if shipment.writes:
            arrived += self._write(loads(shipment.writes, self._resolve))
        if arrived:
            self._buffers.arrived(arrived)

    def take_loaded_states(self) -> frozenset[int]:
        """Handles of optimizers whose state the driver has replaced since this was asked last."""
        loaded, self._loaded_states = frozenset(self._loaded_states), set()
        return loaded

    def _load_bundle(self, bundle: bytes) -> list[int]:
        """Take in new objects; their handles."""
        unpickler = HandleUnpickler(io.BytesIO(bundle), self._resolve)
        unpickler.load()  # the roots; what they lead to is in the list that follows the hooks
        hooks = list(iter(unpickler.load, None))
        found = unpickler.load()
        self.add(found)
        self.add_hooks(hooks)
        self.set_gradients(unpickler.load())
        for handle, obj in found:
            if state_names(obj):
                restore_states(obj, self._share(obj, divide_states(obj)))  # what the driver had counted counts once
            self._mark_known(handle)
        return [handle for handle, _ in found]

    def add(self, items: Sequence[tuple[int, Any]]) -> None:
        """Have objects under their handles."""
        for handle, obj in items:
            self._table.add(handle, obj)
            if isinstance(obj, torch.optim.Optimizer):
                self._watch(obj)
        for handle, _ in items:
            self._buffers.places.note(handle)

    def add_hooks(self, hooks: Sequence[tuple[int, ParameterHooks]]) -> None:
        """Register the program's hooks on parameters."""
        for handle, found in hooks:
            found.attach(self._table.object_of(handle))

    def _mark_known(self, handle: int) -> None:
        """Driver and replica agree on this object now."""
        if isinstance(self._table.object_of(handle), torch.Tensor):
            self._control.mark_flag_known(handle)
        else:
            self._control.mark_known(handle)

    def _write(self, writes: Writes) -> list[int]:
        """Do what the driver did; handles of the tensors and modules that it changed."""
        self._buffers.places.settle()
        for handle, values in writes.tensors.items():
            overwrite(self._table.object_of(handle), values)
        self._write_gradients(writes)
        for handle, changed in writes.hooks.items():
            changed.apply(self._table.object_of(handle))
        for handle, flag in writes.requires_grad.items():
            self._table.object_of(handle).requires_grad_(flag)
            self._control.mark_flag_known(handle)
        for handle, changes in writes.control.items():
            patch_object(self._table.object_of(handle), changes)
            self._buffers.places.note(handle)
        for handle, state in writes.optimizer_states.items():
            self._loaded_states.add(handle)
            held = attributes(self._table.object_of(handle))["state"]
            held.clear()
            held.update(state)
        for handle, states in writes.metrics.items():
            metric = self._table.object_of(handle)
            restore_states(metric, self._share(metric, states))
        written = [*writes.tensors, *writes.control]
        for handle in written:
            self._mark_known(handle)
        return written

    def _write_gradients(self, writes: Writes) -> None:
        for handle in writes.cleared_gradients:
            self._table.object_of(handle).grad = None
        self.num_gradients_set += len(writes.cleared_gradients)
        self.set_gradients(writes.gradients)

    def set_gradients(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Give parameters these gradients."""
        self.num_gradients_set += len(gradients)
        for handle, gradient in gradients.items():
            parameter = self._table.object_of(handle)
            parameter.grad = gradient.clone().to(parameter.device)
