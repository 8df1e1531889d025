"""The driver side of variables: reads fetch the replicas' values, writes are sent to all before the next step."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import final

import torch

from raydist.compat.torch_internals import plain_tensors
from raydist.core.errors import FailedPreconditionError
from raydist.core.exception_utils import collect_errors
from raydist.mirroring.aggregation import Aggregations, aggregate
from raydist.mirroring.gradients import DriverHooks, Gradients
from raydist.mirroring.handles import DriverTable
from raydist.mirroring.messages import MirrorCalls, ReplicaLink, Writes, overwrite
from raydist.mirroring.scope import ScopeCheck
from raydist.mirroring.tensor import UNKNOWN_VERSION, TensorRecord, mirror_tensor, plain_tensor
from raydist.utils.torch_modes import outside_inference_mode

_SMALL_BYTES = 1 << 20  # variables of fewer bytes are fetched together: that takes no longer than one alone


@final
class Variables:
    """Every mirrored parameter and buffer of one strategy (a `TensorOwner`).

    `scope_check` checks devices, and records copies that are made inside the scope; `refresh_flags` is called before
    `requires_grad` is read or written.
    """

    def __init__(
        self, link: ReplicaLink, table: DriverTable, scope_check: ScopeCheck, refresh_flags: Callable[[], None]
    ) -> None:
        self._scope_check = scope_check
        self._link = link
        self._table = table
        self._aggregations = Aggregations()
        self._refresh_flags = refresh_flags
        self.gradients = Gradients(link)
        self.hooks = DriverHooks()
        self._records: dict[int, TensorRecord] = {}
        self._touched: set[int] = set()
        self._written: dict[int, torch.Tensor] = {}  # new values of tensors without memory here, by handle
        self._num_expired = 0  # number of the last step; a tensor is fresh if it was fetched after that step
        self._fetched_at = 0  # value of `_num_expired` when the last fetch of all tensors began
        self._wanted_at = -1  # the same at the last read of one tensor, or of an attribute that reads several
        self._num_bytes = 0
        self._lock = threading.RLock()
        self._storing = threading.Lock()  # held while fetched values are written; never held across a wait

    def add(self, tensor: torch.Tensor, handle: int) -> None:
        """Make `tensor` mirrored; the replicas hold its present value."""
        self._records[handle] = record = mirror_tensor(tensor, handle, self)
        record.fetched_at = self._num_expired
        self._num_bytes += tensor.numel() * tensor.element_size()
        self.gradients.add(record)
        self.hooks.add(record)
        if record.synced is not None:
            self._touched.add(handle)

    def forget(self, handle: int) -> None:
        """Drop the records of a tensor that the program has dropped."""
        self._records.pop(handle, None)
        self._touched.discard(handle)
        self._written.pop(handle, None)
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

    def want_all(self) -> None:
        """Make the next read of a tensor fetch all tensors, because more reads will follow."""
        self._wanted_at = self._num_expired

    def before_values(self, record: TensorRecord) -> None:
        """Fetch the tensor alone if it is the first one read since the last step; the second read fetches all."""
        if record.fetched_at == self._num_expired or record.handle not in self._records or record.is_meta:
            return
        if self._wanted_at == self._num_expired or self._num_bytes <= _SMALL_BYTES:
            self.refresh()
        else:
            self.want_all()
            self._fetch([record.handle])

    @outside_inference_mode
    def values_of(self, record: TensorRecord) -> torch.Tensor:
        self._require_open(record)
        if record.handle in self._written:
            return self._written[record.handle].clone()
        with self._lock:
            images = self._link.call(0, MirrorCalls.tensor_images, [record.handle])
        return images[record.handle].tensor()

    def write(self, record: TensorRecord, values: torch.Tensor) -> None:
        self._require_open(record)
        if (tensor := record.tensor) is not None:
            with plain_tensors():
                self._written[record.handle] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(values)

    def _require_open(self, record: TensorRecord) -> None:
        if record.handle not in self._records:
            raise FailedPreconditionError(
                'The values of a parameter that was made on the device "meta" are on the replicas only, and go with '
                "them when the strategy is closed. Save an rd.Checkpoint, or read .detach(), before close(); "
                "load_state_dict(state, assign=True) loads saved values."
            )

    def before_flags(self, record: TensorRecord) -> None:
        self._refresh_flags()

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
        if self._scope_check.scope.is_active:
            self._scope_check.scope.mark(copy)

    def refresh(self) -> None:
        """Fetch every value that is stale. Blocks until the dispatched steps end."""
        with self._lock:
            if not self.is_fresh:
                began = self._num_expired
                self._fetch(list(self._records))
                self._fetched_at = began

    @outside_inference_mode
    def _fetch(self, handles: Iterable[int]) -> None:
        """Fetch the stale ones of these tensors: from the first replica, or from all where their values differ."""
        with self._lock:
            began = self._num_expired
            stale = {
                handle: tensor
                for handle, (record, tensor) in self._living(handles).items()
                if record.fetched_at != began and not record.is_meta
            }
            if not stale:
                return
            self._aggregations.update(self._table.objects(), self._table.handle_of)
            rules = {handle: self._aggregations.of(handle, tensor) for handle, tensor in stale.items()}
            gathered = [handle for handle, rule in rules.items() if rule.is_gathered]
            alike = [handle for handle, rule in rules.items() if not rule.is_gathered]
            found = [self._link.call(0, MirrorCalls.tensor_images, alike)] if alike else []
            values = {handle: image.tensor() for images in found for handle, image in images.items()}
            per_replica = self._link.call_all(MirrorCalls.tensor_images, gathered) if gathered else []
            for handle in per_replica[0] if per_replica else ():
                shares = [images[handle].tensor() for images in per_replica]
                values[handle] = aggregate(shares, rules[handle].aggregation)
            collect_errors([functools.partial(self._store, handle, value, began) for handle, value in values.items()])

    def divide_anew(self) -> None:
        """Fetch the buffers that differ between replicas, and send them to all replicas with the next step."""
        with self._lock:
            self._aggregations.update(self._table.objects(), self._table.handle_of)
            found = {
                handle: record
                for handle, (record, tensor) in self._living(list(self._records)).items()
                if self._aggregations.of(handle, tensor).is_gathered
            }
            self._fetch(found)
            for handle, record in found.items():
                record.version = UNKNOWN_VERSION
                self._touched.add(handle)

    def _store(self, handle: int, fresh: torch.Tensor, fetched_at: int) -> None:
        record = self._records.get(handle)
        tensor = None if record is None else record.tensor
        if record is None or tensor is None:
            return
        with self._storing, plain_tensors():
            merged = record.merge(tensor, fresh)
            overwrite(tensor, merged)
            record.note_synced(tensor)
            record.fetched_at = fetched_at
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
        touched = self._living(sorted(self._touched))
        with self._storing:
            written = {handle: tensor for handle, (record, tensor) in touched.items() if record.is_written(tensor)}
        for handle, tensor in written.items():
            if not self._records[handle].is_meta:
                self._scope_check.require_device(tensor)
        if any(self._records[handle].fetched_at != self._num_expired for handle in written):
            self._fetch(written)  # the driver changed some elements only, by an alias from before the last step
        with plain_tensors():
            writes.tensors = {handle: tensor.detach() for handle, tensor in written.items()} | self._written
            changed = {
                handle: tensor
                for handle, (each, tensor) in touched.items()
                if each.requires_grad != tensor.requires_grad
            }
            writes.requires_grad = {handle: tensor.requires_grad for handle, tensor in changed.items()}

    def mark_sent(self) -> None:
        """Record that the changes from `collect` were sent: the replicas will hold these values."""
        self.gradients.mark_sent()
        self.hooks.mark_sent()
        self._written.clear()
        for handle, (record, tensor) in self._living(list(self._touched)).items():
            record.note_sent(tensor)
            if record.synced is None:
                self._touched.discard(handle)

    def _living(self, handles: Iterable[int]) -> dict[int, tuple[TensorRecord, torch.Tensor]]:
        """Return the records and tensors of these handles, except of tensors that the program has dropped."""
        found = [(handle, self._records.get(handle)) for handle in handles]
        held = [(handle, record, record.tensor) for handle, record in found if record is not None]
        return {handle: (record, tensor) for handle, record, tensor in held if tensor is not None}

    def release(self) -> None:
        """Make every tensor plain again, with its present values; those without memory here stay, to raise errors."""
        self._fetched_at = self._num_expired
        self.gradients.release()
        for record in self._records.values():
            if not record.is_meta:
                plain_tensor(record)
        self._records.clear()
        self._touched.clear()
