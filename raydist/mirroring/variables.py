"""The driver side of variables: reads fetch the replicas' values, writes are sent to all before the next step."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import final

import torch

from raydist.compat.torch_internals import plain_tensors
from raydist.mirroring.attempt import attempt_all
from raydist.mirroring.buffers.aggregation import Aggregations
from raydist.mirroring.buffers.shares import aggregate
from raydist.mirroring.calls import MirrorCalls, ReplicaLink
from raydist.mirroring.driver_hooks import DriverHooks
from raydist.mirroring.gradients import Gradients
from raydist.mirroring.handles import DriverTable
from raydist.mirroring.origin import Origin
from raydist.mirroring.scope import Scope
from raydist.mirroring.shipment import Writes, overwrite
from raydist.mirroring.tensor import UNKNOWN_VERSION, TensorRecord, mirror_tensor, plain_tensor
from raydist.torch_modes import outside_inference_mode

__all__ = ["Variables"]

_SMALL_BYTES = 1 << 20  # variables of fewer bytes are fetched together: that takes no longer than one alone


@final
class Variables:
    """Every mirrored parameter and buffer of one strategy (a `TensorOwner`).

    Args:
        link: Calls methods of the replicas.
        table: Handles of the driver's objects.
        scope: Records copies that are made inside the scope.
        origin: Checks the devices of variables.
        refresh_flags: Called before `requires_grad` is read or written.
    """

    def __init__(
        self, link: ReplicaLink, table: DriverTable, scope: Scope, origin: Origin, refresh_flags: Callable[[], None]
    ) -> None:
        self._origin = origin
        self._link = link
        self._table = table
        self._aggregations = Aggregations()
        self._scope = scope
        self._refresh_flags = refresh_flags
        self.gradients = Gradients(link)
        self.hooks = DriverHooks()
        self._records: dict[int, TensorRecord] = {}
        self._touched: set[int] = set()
        self._num_expired = 0
        self._fetched_at = 0  # value of `_num_expired` when the last fetch began
        self._alone: tuple[int, int] | None = None  # the same for a tensor that was fetched alone, and its handle
        self._wanted_at = -1  # the same at the last use of an attribute that reads several tensors
        self._num_bytes = 0
        self._lock = threading.RLock()
        self._storing = threading.Lock()  # held while fetched values are written; never held across a wait

    def add(self, tensor: torch.Tensor, handle: int) -> None:
        """Make `tensor` mirrored; the replicas hold its present value."""
        self._records[handle] = record = mirror_tensor(tensor, handle, self)
        self._num_bytes += tensor.numel() * tensor.element_size()
        self.gradients.add(record)
        self.hooks.add(record)
        if record.synced is not None:
            self._touched.add(handle)

    def forget(self, handle: int) -> None:
        """Drop the records of a tensor that the program has dropped."""
        self._records.pop(handle, None)
        self._touched.discard(handle)
        self.gradients.forget(handle)
        self.hooks.forget(handle)

    def abandon(self, handle: int) -> None:
        """Make one tensor plain again."""
        plain_tensor(self._records[handle])
        self.forget(handle)

    def expire(self) -> None:
        """Mark all values as stale because a step was dispatched."""
        self._num_expired += 1  # a fetch under way in another thread returns older values
        self.gradients.expire()

    @property
    def is_fresh(self) -> bool:
        """Return True if the driver has fetched all values since the last step."""
        return self._fetched_at == self._num_expired

    def _is_fresh(self, handle: int) -> bool:
        return self.is_fresh or self._alone == (self._num_expired, handle)

    def want_all(self) -> None:
        """Make the next read of a tensor fetch all tensors, because more reads will follow."""
        self._wanted_at = self._num_expired

    def before_values(self, record: TensorRecord) -> None:
        """Fetch the tensor alone if it is the first one read since the last step; the second read fetches all."""
        if self._is_fresh(record.handle):
            return
        is_first = self._alone is None or self._alone[0] != self._num_expired
        if not is_first or self._wanted_at == self._num_expired or self._num_bytes <= _SMALL_BYTES:
            self.refresh()
        elif record.plain is torch.nn.Parameter and record.handle in self._records:
            self._refresh_one(record.handle)
        else:  # a buffer, which may be gathered from all replicas
            self.refresh()

    def before_flags(self, record: TensorRecord) -> None:
        self._refresh_flags()

    def before_nothing(self, record: TensorRecord) -> None:
        return None

    def before_gradient(self, record: TensorRecord) -> None:
        self.gradients.before_read(record)

    def after_hook(self, record: TensorRecord) -> None:
        if record.handle in self._records:
            self.hooks.registered(record)
            self.after_use(record)

    def after_gradient(self, record: TensorRecord) -> None:
        self.gradients.after_write(record)

    def after_use(self, record: TensorRecord) -> None:
        tensor = record.tensor
        if tensor is not None and record.handle in self._records:
            self._touched.add(record.handle)
            with self._storing:
                record.keep_if_shared(tensor)
            self.gradients.watch(record)

    def copied(self, copy: torch.Tensor) -> None:
        if self._scope.is_active:
            self._scope.mark(copy)

    @outside_inference_mode
    def _refresh_one(self, handle: int) -> None:
        with self._lock:
            began = self._num_expired
            images = self._link.call(0, MirrorCalls.collect_tensors, [handle])
            attempt_all([functools.partial(self._store, each, image.tensor()) for each, image in images.items()])
            self._alone = began, handle

    @outside_inference_mode
    def refresh(self) -> None:
        """Fetch every value that changed. Blocks until the dispatched steps end."""
        with self._lock:
            if self.is_fresh:
                return
            began = self._num_expired
            images = self._link.call(0, MirrorCalls.collect_tensors, None)
            attempt_all([functools.partial(self._store, handle, image.tensor()) for handle, image in images.items()])
            self._aggregations.update(self._table.objects(), self._table.handle_of)
            if any(self._aggregations.of(handle, tensor).is_gathered for handle, tensor in self._tensors()):
                self._refresh_gathered()
            self._fetched_at = began

    def _tensors(self) -> list[tuple[int, torch.Tensor]]:
        found = [(handle, record.tensor) for handle, record in self._records.items()]
        return [(handle, tensor) for handle, tensor in found if tensor is not None]

    def _refresh_gathered(self) -> None:
        handles = sorted(set().union(*self._link.call_all(MirrorCalls.changed_gathered)))
        if not handles:
            return
        per_replica = self._link.call_all(MirrorCalls.buffer_images, handles)
        tensors = dict(self._tensors())
        for handle, images in zip(handles, zip(*per_replica, strict=True), strict=True):
            if handle in tensors:
                how = self._aggregations.of(handle, tensors[handle]).aggregation
                self._store(handle, aggregate([image.tensor() for image in images], how))

    def _store(self, handle: int, fresh: torch.Tensor) -> None:
        record = self._records.get(handle)
        tensor = None if record is None else record.tensor
        if record is None or tensor is None:
            return
        with self._storing, plain_tensors():
            merged = record.merge(tensor, fresh)
            overwrite(tensor, merged)
            record.note_synced(tensor)
            if merged is not fresh:  # the driver's elements in it must be sent
                record.version = UNKNOWN_VERSION

    def set_flag(self, handle: int, requires_grad: bool) -> None:
        """Take over `requires_grad` from the replicas."""
        record = self._records.get(handle)
        tensor = None if record is None else record.tensor
        if record is not None and tensor is not None:
            with plain_tensors():
                tensor.requires_grad_(requires_grad)
            record.requires_grad = requires_grad

    def collect(self, writes: Writes) -> None:
        """Add the tensors, flags, gradients and hooks that the driver changed since the last step to `writes`."""
        self.gradients.collect(writes)
        self.hooks.collect(writes)
        for handle, (record, tensor) in self._live().items():
            with self._storing:
                is_written = record.is_written(tensor)
            if is_written:
                self._origin.require_device(tensor)
                if not self._is_fresh(handle):
                    self.refresh()
                with plain_tensors():
                    writes.tensors[handle] = tensor.detach()
            with plain_tensors():
                if tensor.requires_grad != record.requires_grad:
                    writes.requires_grad[handle] = tensor.requires_grad

    def mark_sent(self) -> None:
        """Record that the changes from `collect` were sent: the replicas will hold these values."""
        self.gradients.mark_sent()
        self.hooks.mark_sent()
        for handle, (record, tensor) in self._live().items():
            record.note_sent(tensor)
            if record.synced is None:
                self._touched.discard(handle)

    def _live(self) -> dict[int, tuple[TensorRecord, torch.Tensor]]:
        """Return the possibly written tensors; remove the tensors that the program has dropped."""
        live: dict[int, tuple[TensorRecord, torch.Tensor]] = {}
        for handle in sorted(self._touched):
            record = self._records.get(handle)
            tensor = None if record is None else record.tensor
            if record is None or tensor is None:
                self._touched.discard(handle)
            else:
                live[handle] = (record, tensor)
        return live

    def release(self) -> None:
        """Make every tensor plain again, with its present values."""
        self._fetched_at = self._num_expired
        self.gradients.release()
        for record in self._records.values():
            plain_tensor(record)
        self._records.clear()
        self._touched.clear()
