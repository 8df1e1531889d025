"""Gradients on the driver: `p.grad` shows the replicas' gradient, and the driver's changes to `p.grad` reach replicas.

The driver fetches all gradients at the first read of one after a step. `zero_grad()` of a mirrored module or optimizer
must not fetch gradients only to drop them, so mirrored objects replace torch's method by `zero_grad` below.
"""

from __future__ import annotations

import types
from collections.abc import Hashable, Iterable
from itertools import chain
from typing import Any, final

import torch
from torch.utils.hooks import RemovableHandle

from raydist.checkpoints.object_state import OWNER
from raydist.collectives.reducer.parameter_hooks import OwnHook, ParameterHooks
from raydist.compat.torch_internals import hook_tables, num_writes, plain_tensors
from raydist.mirroring.messages import MirrorCalls, ReplicaLink, TensorImage, Writes
from raydist.mirroring.object_kinds import held_parameters
from raydist.mirroring.tensor import MirroredTensor, TensorRecord, record_of, tensor_address
from raydist.utils.torch_modes import outside_inference_mode


@final
class Gradients:
    """The `.grad` of every mirrored parameter of one strategy."""

    def __init__(self, link: ReplicaLink) -> None:
        self._link = link
        self._records: dict[int, TensorRecord] = {}
        # All by handle of the parameter:
        self._fetched: dict[int, tuple[torch.Tensor, _Version]] = {}  # gradients that equalled the replicas'
        self._values: dict[int, TensorImage] = {}  # values fetched since the last step, to find writes through `.data`
        self._cleared: set[int] = set()  # gradients that the driver set to None
        self._touched: set[int] = set()  # gradients that the driver set, or computed by a backward
        self._sent: dict[int, torch.Tensor] = {}  # gradients in the payload that is being prepared
        self._hooks: dict[int, RemovableHandle] = {}
        self._num_expired = 0  # number of dispatched steps
        self._fetched_at = 0  # value of `_num_expired` when the last fetch began

    def add(self, record: TensorRecord) -> None:
        """Track one more parameter. The replicas hold the same gradient as the driver."""
        tensor = record.tensor
        if not isinstance(tensor, torch.nn.Parameter):
            return
        self._records[record.handle] = record
        with plain_tensors():
            if tensor.grad is not None:
                self._fetched[record.handle] = tensor.grad, _version_of(tensor.grad)
        self.watch(record)

    def watch(self, record: TensorRecord) -> None:
        """Register a hook that fetches the replicas' gradient before a backward on the driver adds to it.

        torch refuses hooks on a frozen parameter, so the caller calls this again after each use of the parameter.
        """
        tensor = record.tensor
        if tensor is None or record.handle in self._hooks or record.handle not in self._records:
            return
        with plain_tensors():
            if tensor.requires_grad:
                self._hooks[record.handle] = tensor.register_hook(OwnHook(self._before_backward, record))

    def _before_backward(self, record: TensorRecord, _: torch.Tensor) -> None:
        self._touched.add(record.handle)
        self.before_read(record)

    def forget(self, handle: int) -> None:
        """Drop the records of a parameter that the program has dropped."""
        self._records.pop(handle, None)
        self._fetched.pop(handle, None)
        self._values.pop(handle, None)
        self._sent.pop(handle, None)
        self._cleared.discard(handle)
        self._touched.discard(handle)
        hook = self._hooks.pop(handle, None)
        if hook is not None:
            hook.remove()

    def release(self) -> None:
        """Stop tracking all parameters; the gradients on the driver become ordinary ones."""
        self._fetched_at = self._num_expired
        for handle in list(self._records):
            self.forget(handle)

    def expire(self) -> None:
        """Mark all gradients as stale because a step was dispatched."""
        self._num_expired += 1  # gradients of a fetch that is under way in another thread are stale, too
        self._values.clear()

    def before_read(self, record: TensorRecord) -> None:
        """Fetch all gradients if they are stale. Gradients that the driver has set or changed stay."""
        if (
            self._fetched_at == self._num_expired
            or record.handle in self._cleared
            or record.handle not in self._records
        ):
            return
        self._fetch()

    @outside_inference_mode
    def _fetch(self) -> None:
        began = self._num_expired
        images = self._link.call(0, MirrorCalls.collect_gradients)
        self._fetched_at = began
        with plain_tensors():
            for handle, tensor in self._tensors(self._records.keys()):
                keeps = handle in self._cleared or not (tensor.grad is None or self._is_unchanged(handle, tensor.grad))
                if not keeps:
                    self._store(handle, tensor, images.get(handle))

    def _tensors(self, handles: Iterable[int]) -> list[tuple[int, torch.Tensor]]:
        found = [(handle, self._records[handle].tensor) for handle in sorted(handles) if handle in self._records]
        return [(handle, tensor) for handle, tensor in found if tensor is not None]

    def _is_unchanged(self, handle: int, gradient: torch.Tensor) -> bool:
        """Return True for a gradient that was fetched or sent, and not written to since."""
        known = self._fetched.get(handle)
        if known is None or known[0] is not gradient or known[1] != _version_of(gradient):
            return False
        values = self._values.get(handle)
        return values is None or values.shows(gradient)

    def _store(self, handle: int, tensor: torch.Tensor, image: TensorImage | None) -> None:
        # During a cast of the module the parameter has the new dtype already.
        tensor.grad = None if image is None else image.tensor().to(tensor.device, tensor.dtype)
        if tensor.grad is None or image is None or image.dtype != tensor.dtype:
            self._fetched.pop(handle, None)
        else:
            self._fetched[handle] = tensor.grad, _version_of(tensor.grad)
            self._values[handle] = image

    def after_write(self, record: TensorRecord) -> None:
        """Record that the driver executed `p.grad = ...` or `del p.grad`."""
        tensor = record.tensor
        if tensor is None or record.handle not in self._records:
            return
        with plain_tensors():
            self._touched.add(record.handle)
            self._fetched.pop(record.handle, None)  # `collect` sends gradients that are not in `_fetched`
            if tensor.grad is None:
                self._cleared.add(record.handle)

    def clear(self, obj: Any) -> None:
        """Set the gradients of a module or an optimizer to None."""
        with plain_tensors():
            for parameter in held_parameters(obj):
                if type(parameter) is MirroredTensor and record_of(parameter).handle in self._records:
                    parameter.grad = None
                    self.after_write(record_of(parameter))

    def collect(self, writes: Writes) -> None:
        """Add the gradients that the driver cleared, set, changed or computed since the last step to `writes`."""
        writes.cleared_gradients = [handle for handle, _ in self._tensors(self._cleared)]
        with plain_tensors():
            held = [(handle, tensor.grad) for handle, tensor in self._tensors(self._touched | self._fetched.keys())]
            self._sent = {
                handle: gradient
                for handle, gradient in held
                if gradient is not None and not self._is_unchanged(handle, gradient)
            }
            writes.gradients = {handle: gradient.detach() for handle, gradient in self._sent.items()}

    def mark_sent(self) -> None:
        """Record that the changes from `collect` were sent."""
        self._cleared.clear()
        self._touched.clear()
        self._fetched |= {handle: (gradient, _version_of(gradient)) for handle, gradient in self._sent.items()}
        self._sent = {}


_Version = tuple[int, int, torch.dtype]


def _version_of(gradient: torch.Tensor) -> _Version:
    """Return values that change when the gradient is written to, or gets other memory (`model.half()`)."""
    return num_writes(gradient), tensor_address(gradient), gradient.dtype


def zero_grad_of(obj: Any, method: Any) -> Any:
    """Return the method that the program gets as `obj.zero_grad`: our own if `method` is torch's, else `method`."""
    torchs = torch.nn.Module.zero_grad, torch.optim.Optimizer.zero_grad  # raydist may have wrapped the first one by now
    return types.MethodType(zero_grad, obj) if getattr(method, "__func__", None) in torchs else method


def zero_grad(self: Any, set_to_none: bool = True) -> None:
    """Clear gradients without fetching them; otherwise as `torch.optim.Optimizer.zero_grad`. Pickled by its name."""
    owner = getattr(type(self), OWNER, None)
    if set_to_none and owner is not None:
        owner.clear_gradients(self)
    base = torch.optim.Optimizer if isinstance(self, torch.optim.Optimizer) else torch.nn.Module
    base.zero_grad(self, set_to_none)


HOOKS_OF_DRIVER = "driver"
"""The origin in the keys under which replicas keep the driver's hooks."""


@final
class DriverHooks:
    """The hooks on the mirrored parameters of one strategy. A parameter that never had a hook costs nothing."""

    def __init__(self) -> None:
        # The keys of hooks, not the hooks: a hook may reference a model, which must not be kept alive.
        self._known: dict[int, tuple[TensorRecord, _Keys]] = {}
        self._pending: dict[int, _Keys] = {}

    def add(self, record: TensorRecord) -> None:
        """Track one more parameter. The replicas already have the hooks on it."""
        with plain_tensors():
            tensor = record.tensor
            if tensor is not None and ParameterHooks.of(tensor):
                self._known[record.handle] = record, _keys_of(tensor)

    def registered(self, record: TensorRecord) -> None:
        """Track a mirrored tensor on which the driver has registered a hook."""
        self._known.setdefault(record.handle, (record, ((), ())))

    def forget(self, handle: int) -> None:
        """Drop the record of a parameter that the program has dropped."""
        self._known.pop(handle, None)

    def collect(self, writes: Writes) -> None:
        """Add the hooks that were registered or removed since the last step to `writes`."""
        self._pending = {}
        if not self._known:
            return
        with plain_tensors():
            for handle, (record, known) in self._known.items():
                tensor = record.tensor
                if tensor is not None and (now := _keys_of(tensor)) != known:
                    self._pending[handle] = now
                    hooks, before = ParameterHooks.of(tensor), frozenset(chain(*known))
                    removed = tuple((HOOKS_OF_DRIVER, key) for key in before - hooks.keys())
                    writes.hooks[handle] = removed, hooks.without(before).under(HOOKS_OF_DRIVER)

    def mark_sent(self) -> None:
        """Record that the changes from `collect` were sent."""
        for handle, keys in self._pending.items():
            if handle in self._known:
                self._known[handle] = self._known[handle][0], keys
        self._pending = {}


_Keys = tuple[tuple[Hashable, ...], tuple[Hashable, ...]]


def _keys_of(tensor: torch.Tensor) -> _Keys:
    """Return the keys of all hooks of both kinds, raydist's included: leaving these out takes three times as long."""
    before, after = hook_tables(tensor)
    return tuple(before or ()), tuple(after or ())
