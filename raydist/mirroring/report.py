"""What a replica reports to the driver: only what changed since the driver last heard of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from typing import Any, final

import torch

from raydist.mirroring.handles import ReplicaTable
from raydist.mirroring.kinds import capture_object, content_digest
from raydist.mirroring.shipment import ControlChanges, TensorImage
from raydist.pickling.attribute_table import AttributePath, AttributeTable, attributes, capture, changed, seal
from raydist.pickling.pickler import PersistentId, dumps

__all__ = ["ControlCollector", "TensorCollector", "is_averaged"]


def is_averaged(tensor: torch.Tensor) -> bool:
    """Whether the driver reads the mean over replicas: a buffer of running statistics."""
    return tensor.is_floating_point() and not isinstance(tensor, torch.nn.Parameter)


@final
class ControlCollector:
    """Compares control states with those that the driver knows."""

    def __init__(self, table: ReplicaTable, identify: Callable[[Any], PersistentId | None]) -> None:
        self._table = table
        self._identify = identify
        self._digest = content_digest(table.handle_of)
        self._known: dict[int, AttributeTable] = {}
        self._flags: dict[int, bool] = {}
        self._at_step_start: dict[int, dict[str, Any]] = {}
        self._watched_at = -1
        self._watched_objects: list[tuple[int, Any]] = []

    def mark_known(self, handle: int) -> None:
        """The driver knows the present state of this object."""
        self._known[handle] = seal(self._capture(handle))

    def mark_flag_known(self, handle: int) -> None:
        """The driver knows the present `requires_grad` of this tensor."""
        self._flags[handle] = self._table.object_of(handle).requires_grad

    def note_step_start(self) -> None:
        """A step begins: remember what it could change, cheaply."""
        self._at_step_start = {handle: _quick(obj) for handle, obj in self._watched()}

    def _watched(self) -> list[tuple[int, Any]]:
        """Objects with attributes that a step may change. Looked up once per change of the table."""
        if self._watched_at != self._table.changes:
            self._watched_at = self._table.changes
            items = self._table.items()
            self._watched_objects = [
                (handle, obj) for handle, obj in items if not isinstance(obj, torch.Tensor | torch.Generator)
            ]
        return self._watched_objects

    def collect(self, *, modules: bool) -> bytes:
        """Pickle of (changes by handle, `requires_grad` flags by handle)."""
        changes: dict[int, ControlChanges] = {}
        flags: dict[int, bool] = {}
        for handle, obj in self._table.items():
            if isinstance(obj, torch.Tensor):
                if modules and self._flags.get(handle) is not obj.requires_grad:
                    flags[handle] = self._flags[handle] = obj.requires_grad
            elif isinstance(obj, torch.nn.Module) is modules or isinstance(obj, torch.Generator):
                self._collect_one(handle, changes)
        return dumps((changes, flags), self._identify)

    def _collect_one(self, handle: int, changes: dict[int, ControlChanges]) -> None:
        now = self._capture(handle)
        values = changed(self._known.get(handle, {}), now)
        recent = self._recent(handle)
        if values or recent:
            changes[handle] = ControlChanges(values, recent)
            self._known[handle] = seal(now)

    def _recent(self, handle: int) -> frozenset[AttributePath]:
        before = self._at_step_start.get(handle)
        if before is None:
            return frozenset()
        now = _quick(self._table.object_of(handle))
        return frozenset(changed(capture(before, digest=_nothing), capture(now, digest=_nothing)))

    def _capture(self, handle: int) -> AttributeTable:
        return capture_object(self._table.object_of(handle), self._digest)


def _nothing(value: Any) -> Hashable:
    """Mark of whatever is too slow to look at before every step."""
    return "not compared"


def _quick(obj: Any) -> dict[str, Any]:
    """The part of the attributes that is worth watching step by step: numbers, names, and lists and dicts of them."""
    if isinstance(obj, torch.nn.Module):
        own = {name: value for name, value in attributes(obj).items() if name[0] != "_" and name != "training"}
    else:
        own = {name: value for name, value in attributes(obj).items() if name not in ("state", "step")}
    return {name: _copied(value) if isinstance(value, dict | list) else value for name, value in own.items()}


def _copied(value: Any, depth: int = 4) -> Any:
    """Containers copied, their contents not."""
    if type(value) is list and depth:
        return [_copied(item, depth - 1) for item in value]
    if isinstance(value, dict) and depth:
        return {name: _copied(item, depth - 1) for name, item in value.items()}
    return value


@final
class TensorCollector:
    """Tells which tensors changed since they were last reported, by a digest of their bytes.

    `_version` would be faster, but `ema.data.mul_(0.9)` leaves it unchanged.
    """

    def __init__(self, table: ReplicaTable) -> None:
        self._table = table
        self._known: dict[int, bytes] = {}

    def mark_known(self, handle: int) -> None:
        """The driver knows the present values of this tensor."""
        self._known[handle] = _bytes_digest(TensorImage.of(self._table.object_of(handle)))

    def collect(self, *, averaged: bool) -> dict[int, TensorImage]:
        """Images of the changed tensors: the averaged buffers, or all others."""
        found: dict[int, TensorImage] = {}
        for handle, obj in self._table.items():
            if isinstance(obj, torch.Tensor) and is_averaged(obj) is averaged:
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
    return digest.digest()
