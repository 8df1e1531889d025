"""The reports of a replica to the driver, which contain only changes since the last report."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from raydist.mirroring.buffers.aggregation import Aggregations
from raydist.mirroring.handles import ReplicaTable
from raydist.mirroring.kinds import capture_object, content_digest
from raydist.mirroring.shipment import TensorImage
from raydist.pickling.attribute_table import AttributePath, AttributeTable, changed, seal
from raydist.pickling.pickler import PersistentId, dumps

__all__ = ["ControlCollector", "TensorCollector"]


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
class TensorCollector:
    """Tells which tensors changed since they were last reported, by a digest of their bytes.

    `_version` would be faster, but `ema.data.mul_(0.9)` leaves it unchanged.
    """

    def __init__(self, table: ReplicaTable, aggregations: Aggregations) -> None:
        self._table = table
        self._aggregations = aggregations
        self._known: dict[int, bytes] = {}

    def mark_known(self, handle: int) -> None:
        """The driver knows the present values of this tensor."""
        self._known[handle] = _bytes_digest(TensorImage.of(self._table.object_of(handle)))

    def forget_known(self) -> None:
        """The driver knows nothing."""
        self._known.clear()

    def collect(self, *, gathered: bool, among: Sequence[int] | None = None) -> dict[int, TensorImage]:
        """Images of the changed tensors: of what the driver reads from all replicas, or of all others (or of some)."""
        found: dict[int, TensorImage] = {}
        named = self._table.items() if among is None else [(each, self._table.object_of(each)) for each in among]
        for handle, obj in named:
            if isinstance(obj, torch.Tensor) and self._aggregations.of(handle, obj).is_gathered is gathered:
                image = TensorImage.of(obj)
                digest = _bytes_digest(image)
                if self._known.get(handle) != digest:
                    found[handle] = image
                    self._known[handle] = digest
        return found


def _bytes_digest(image: TensorImage) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr((image.dtype, tuple(image.shape))).encode())
    digest.update(image.array.data)
    for part in image.parts:
        digest.update(_bytes_digest(part))
    return digest.digest()
