"""The driver side of hooks on parameters: hooks that the program registers or removes are sent to the replicas."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import chain
from typing import final

import torch

from raydist.collectives.reducer.parameter_hooks import ParameterHooks
from raydist.compat.torch_internals import hook_tables, plain_tensors
from raydist.mirroring.shipment import HookChanges, Writes
from raydist.mirroring.tensor import TensorRecord

__all__ = ["HOOKS_OF_DRIVER", "DriverHooks"]

HOOKS_OF_DRIVER = "driver"
"""The origin in the keys under which replicas keep the driver's hooks."""


@final
class DriverHooks:
    """The hooks on the mirrored parameters of one strategy. A parameter that never had a hook costs nothing."""

    def __init__(self) -> None:
        # Keys only: the record of a hook must not keep the objects that the hook references alive.
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
                    writes.hooks[handle] = _changes(ParameterHooks.of(tensor), frozenset(chain(*known)))

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


def _changes(now: ParameterHooks, known: frozenset[Hashable]) -> HookChanges:
    gone = tuple((HOOKS_OF_DRIVER, key) for key in known - now.keys())
    return HookChanges(gone, now.without(known).under(HOOKS_OF_DRIVER))
