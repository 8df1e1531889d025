"""The reports of a replica to the driver, which contain only changes since the last report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch

from raydist.mirroring.handles import ReplicaTable
from raydist.mirroring.kinds import capture_object, content_digest
from raydist.pickling.attribute_table import AttributePath, AttributeTable, changed, seal
from raydist.pickling.pickler import PersistentId, dumps

__all__ = ["ControlCollector"]


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
