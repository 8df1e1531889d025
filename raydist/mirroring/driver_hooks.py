"""The driver half for hooks on parameters: what the program registers and removes here reaches the replicas."""

from __future__ import annotations

from collections.abc import Hashable
from typing import final

import torch

from raydist.collectives.parameter_hooks import ParameterHooks
from raydist.mirroring.shipment import HookChanges, Writes
from raydist.mirroring.tensor import TensorRecord

__all__ = ["HOOKS_OF_DRIVER", "DriverHooks"]

HOOKS_OF_DRIVER = "driver"
"""The origin in the keys under which the replicas keep them."""


@final
class DriverHooks:
    """The hooks on the mirrored parameters of one strategy. Costs nothing for those that never had any."""

    def __init__(self) -> None:
        # Keys only: what is remembered of a hook must not keep what it reaches alive.
        self._known: dict[int, tuple[TensorRecord, frozenset[Hashable]]] = {}
        self._pending: dict[int, frozenset[Hashable]] = {}

    def add(self, record: TensorRecord) -> None:
        """Look after one more parameter. The replicas have its hooks."""
        hooks = _hooks_of(record)
        if hooks:
            self._known[record.handle] = record, hooks.keys()

    def registered(self, record: TensorRecord) -> None:
        """A hook was registered here on a mirrored tensor."""
        self._known.setdefault(record.handle, (record, frozenset()))

    def forget(self, handle: int) -> None:
        """The program dropped a parameter."""
        self._known.pop(handle, None)

    def collect(self, writes: Writes) -> None:
        """Add what was registered and removed since the last step."""
        self._pending = {}
        for handle, (record, known) in self._known.items():
            now = _hooks_of(record)
            if now.keys() != known:
                self._pending[handle] = now.keys()
                gone = tuple((HOOKS_OF_DRIVER, key) for key in known - now.keys())
                writes.hooks[handle] = HookChanges(gone, now.without(known).under(HOOKS_OF_DRIVER))

    def mark_sent(self) -> None:
        """What `collect` found is on its way."""
        for handle, keys in self._pending.items():
            if handle in self._known:
                self._known[handle] = self._known[handle][0], keys
        self._pending = {}


def _hooks_of(record: TensorRecord) -> ParameterHooks:
    tensor = record.tensor
    with torch._C.DisableTorchFunctionSubclass():
        return ParameterHooks() if tensor is None else ParameterHooks.of(tensor)
