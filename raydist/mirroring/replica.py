"""The replica half of mirroring: plain PyTorch objects under the handles that the driver gave them.

A step pays nothing for being mirrored. Between steps the driver sends what it changed (`apply`) and asks for what it
wants to read (`collect_*`).
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch

from raydist.collectives.parameter_hooks import ParameterHooks
from raydist.errors import FailedPreconditionError
from raydist.mirroring.buffer_places import BufferPlaces
from raydist.mirroring.calls import MirrorCalls
from raydist.mirroring.captures import CaptureWatch
from raydist.mirroring.handles import ReplicaTable
from raydist.mirroring.kinds import patch_object
from raydist.mirroring.metric_states import divide_states, hold_states, restore_states, state_names
from raydist.mirroring.replica_hooks import note_steps, refuse_new_parameters
from raydist.mirroring.report import ControlCollector, TensorCollector, is_averaged
from raydist.mirroring.shipment import Shipment, TensorImage, Writes, overwrite
from raydist.mirroring.update_log import UpdateLog
from raydist.pickling.attribute_table import attributes
from raydist.pickling.pickler import HandleUnpickler, PersistentId, dumps, loads

__all__ = ["MirrorReplica"]


@final
class MirrorReplica(MirrorCalls):
    """The mirrored objects of one replica.

    Args:
        rank: The replica's number.
        device: Where mirrored tensors live.
        externals: What functions may reach that every replica has by itself, by name.

    Attributes:
        updates: What its optimizers have done.
    """

    def __init__(self, rank: int, *, device: str = "cpu", externals: Mapping[str, Any] | None = None) -> None:
        self.rank = rank
        self._device = device
        self._externals = dict(externals or {})
        self._parts: Sequence[Any] = ()
        self._functions: dict[bytes, tuple[bytes, Any]] = {}
        self._watches: dict[bytes, CaptureWatch] = {}
        self._running: CaptureWatch | None = None
        self._remarks: dict[str, bool] = {}  # and whether the driver is still to be told
        self._start_empty()

    def _start_empty(self) -> None:
        self._table = ReplicaTable()
        self._parameters: tuple[torch.nn.Parameter, ...] = ()
        self._parameters_at = -1
        self._control = ControlCollector(self._table, self._identify)
        self._tensors = TensorCollector(self._table)
        self.updates = UpdateLog(self._table)
        self._buffer_places = BufferPlaces(self._table)

    def apply(self, shipment: Shipment, parts: Sequence[Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Take in a shipment; the step's function, positional and keyword arguments.

        Args:
            shipment: What the driver prepared.
            parts: This replica's part of every `PerReplica` leaf, in the order of `Shipment.per_replica`.
        """
        for handle in shipment.released:
            self._table.release(handle)
            self._buffer_places.forget(handle)
        if shipment.bundle:
            self._load_bundle(shipment.bundle)
        if shipment.writes:
            self._write(loads(shipment.writes, self._resolve))
        for digest in shipment.forget:
            self._functions.pop(digest, None)
            self._watches.pop(digest, None)
        self._parts = parts
        try:
            function = self._function(shipment)
            args, kwargs = loads(shipment.arguments, self._resolve)
        finally:
            self._parts = ()
        return function, args, kwargs

    @contextmanager
    def guard(self) -> Iterator[None]:
        """For the time of a step: a parameter created in a mirrored module is an error, changed copies are noted."""
        with refuse_new_parameters(lambda obj: self._table.handle_of(obj) is not None):
            yield
        remark = self._running.after_run() if self._running is not None else ""
        if remark:
            self._remarks.setdefault(remark, True)

    def take_remarks(self) -> tuple[str, ...]:
        """What the program should be warned of, each once."""
        if not any(self._remarks.values()):
            return ()
        told = tuple(remark for remark, untold in self._remarks.items() if untold)
        self._remarks.update(dict.fromkeys(told, False))
        return told

    def objects(self) -> list[Any]:
        """Everything that is mirrored, in an order that is the same on all replicas."""
        return [obj for _, obj in self._table.items()]

    def parameters(self) -> tuple[torch.nn.Parameter, ...]:
        """Every mirrored parameter, in an order that is the same on all replicas; one tuple until that changes."""
        if self._table.changes != self._parameters_at:
            self._parameters_at = self._table.changes
            self._parameters = tuple(obj for _, obj in self._table.items() if isinstance(obj, torch.nn.Parameter))
        return self._parameters

    def export_buffers(self) -> list[torch.Tensor]:
        """Copies of every mirrored buffer, in an order that is the same on all replicas."""
        return [buffer.detach().clone() for buffer in self._buffers()]

    def import_buffers(self, values: Sequence[torch.Tensor]) -> None:
        """Take another replica's `export_buffers()`: after a step on stand-in rows."""
        for buffer, value in zip(self._buffers(), values, strict=True):
            overwrite(buffer, value)

    def _buffers(self) -> list[torch.Tensor]:
        self._buffer_places.settle()
        tensors = [obj for _, obj in self._table.items() if isinstance(obj, torch.Tensor)]
        return [tensor for tensor in tensors if not isinstance(tensor, torch.nn.Parameter)]

    def hold_metrics(self) -> dict[int, dict[str, Any]]:
        """The states of every metric, to be given to `restore_metrics` after a step that must not count."""
        return {handle: hold_states(metric) for handle, metric in self._table.items() if state_names(metric)}

    def restore_metrics(self, held: dict[int, dict[str, Any]]) -> None:
        """Put back what `hold_metrics` gave."""
        for handle, states in held.items():
            restore_states(self._table.object_of(handle), states)

    def collect_control(self, modules: bool) -> bytes:
        self._buffer_places.settle()
        return self._control.collect(modules=modules)

    def collect_tensors(self) -> dict[int, TensorImage]:
        self._buffer_places.settle()
        return self._tensors.collect(averaged=False)

    def collect_gradients(self) -> dict[int, TensorImage]:
        parameters = [(handle, obj) for handle, obj in self._table.items() if isinstance(obj, torch.nn.Parameter)]
        return {handle: TensorImage.of(obj.grad) for handle, obj in parameters if obj.grad is not None}

    def changed_averages(self) -> list[int]:
        self._buffer_places.settle()
        return list(self._tensors.collect(averaged=True))

    def buffer_images(self, handles: Sequence[int]) -> list[TensorImage]:
        return [TensorImage.of(self._table.object_of(handle)) for handle in handles]

    def collect_optimizer_state(self, handle: int) -> bytes:
        return dumps(dict(attributes(self._table.object_of(handle))["state"]), self._identify)

    def collect_metrics(self) -> bytes:
        return dumps(self.hold_metrics(), self._identify)

    def dump(self) -> tuple[bytes, frozenset[int]]:
        self._buffer_places.settle()
        items = self._table.items()
        parameters = [(handle, obj) for handle, obj in items if isinstance(obj, torch.nn.Parameter)]
        hooks = [(handle, found) for handle, obj in parameters if (found := ParameterHooks.of(obj))]
        state = dumps((items, hooks), lambda _: None, to_replica=True)
        return state, frozenset(handle for handle, _ in items)

    def load(self, state: bytes) -> None:
        self._buffer_places.settle()
        metrics, statistics = self.hold_metrics(), self._hold_statistics()
        self._start_empty()
        items, hooks = loads(state, self._resolve)
        self._add(items)
        self._add_hooks(hooks)
        for handle, obj in items:
            if handle in statistics:
                overwrite(obj, statistics[handle])
            elif state_names(obj):
                # What the other one counted is counted there.
                restore_states(obj, metrics.get(handle) or divide_states(obj)[1])
        self._watches.clear()
        self._functions.clear()  # they refer to the objects of before; the driver sends them again

    def _hold_statistics(self) -> dict[int, torch.Tensor]:
        """Copies of what each replica gathers from its own rows."""
        tensors = [(handle, obj) for handle, obj in self._table.items() if isinstance(obj, torch.Tensor)]
        return {handle: obj.detach().clone() for handle, obj in tensors if is_averaged(obj)}

    def _load_bundle(self, bundle: bytes) -> None:
        unpickler = HandleUnpickler(io.BytesIO(bundle), self._resolve)
        unpickler.load()  # the roots; what they lead to is in the list that follows the hooks
        hooks = list(iter(unpickler.load, None))
        found = unpickler.load()
        self._add(found)
        self._add_hooks(hooks)
        self._set_gradients(unpickler.load())
        for handle, _ in found:
            self._mark_known(handle)

    def _add(self, items: Sequence[tuple[int, Any]]) -> None:
        for handle, obj in items:
            self._table.add(handle, obj)
            if isinstance(obj, torch.optim.Optimizer):
                note_steps(obj, self.updates.note)
        for handle, _ in items:
            self._buffer_places.note(handle)

    def _add_hooks(self, hooks: Sequence[tuple[int, ParameterHooks]]) -> None:
        for handle, found in hooks:
            found.attach(self._table.object_of(handle))

    def _mark_known(self, handle: int) -> None:
        """Driver and replica agree on this object now."""
        if isinstance(self._table.object_of(handle), torch.Tensor):
            self._tensors.mark_known(handle)
            self._control.mark_flag_known(handle)
        else:
            self._control.mark_known(handle)

    def _write(self, writes: Writes) -> None:
        self._buffer_places.settle()
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
            self._buffer_places.note(handle)
        for handle, state in writes.optimizer_states.items():
            held = attributes(self._table.object_of(handle))["state"]
            held.clear()
            held.update(state)
        for handle, (first, others) in writes.metrics.items():
            restore_states(self._table.object_of(handle), first if self.rank == 0 else others)
        for handle in (*writes.tensors, *writes.control):
            self._mark_known(handle)

    def _write_gradients(self, writes: Writes) -> None:
        for handle in writes.cleared_gradients:
            self._table.object_of(handle).grad = None
        self._set_gradients(writes.gradients)

    def _set_gradients(self, gradients: Mapping[int, torch.Tensor]) -> None:
        for handle, gradient in gradients.items():
            parameter = self._table.object_of(handle)
            parameter.grad = gradient.clone().to(parameter.device)

    def _function(self, shipment: Shipment) -> Any:
        self._running = None
        if not shipment.digest:
            return loads(shipment.function, self._resolve)
        if shipment.function:
            function = loads(shipment.function, self._resolve)
            self._functions[shipment.digest] = (shipment.function, function)
            if self.rank == 0:
                self._watches[shipment.digest] = CaptureWatch(function, self._is_shared)
        if shipment.digest not in self._functions:
            raise FailedPreconditionError(
                f"raydist bug: replica {self.rank} was sent the digest of a function that it does not have."
            )
        self._running = self._watches.get(shipment.digest)
        return self._functions[shipment.digest][1]

    def _is_shared(self, obj: Any) -> bool:
        """Whether a function that holds `obj` holds more than a copy."""
        return self._table.handle_of(obj) is not None or any(obj is known for known in self._externals.values())

    def _identify(self, obj: Any) -> PersistentId | None:
        handle = self._table.handle_of(obj)
        return None if handle is None else ("object", handle)

    def _resolve(self, pid: PersistentId) -> Any:
        match pid:
            case ("object", handle):
                return self._table.object_of(handle)
            case ("part", index):
                return self._parts[index]
            case ("device",):
                return self._device
            case ("external", name):
                return self._externals[name]
        raise FailedPreconditionError(f"raydist bug: a replica was sent the unknown persistent id {pid!r}.")
