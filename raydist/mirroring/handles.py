"""Tables of objects and their handles: one on the driver, one on each replica."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, final


@final
class DriverTable:
    """Handles of the driver's objects, by weak reference: the handle of an object that the program drops is released.

    Objects without weak references (generators in torch 2.11) stay until the table is cleared.
    """

    def __init__(self) -> None:
        self._handles: dict[int, int] = {}
        self._refs: dict[int, Callable[[], Any]] = {}
        self._released: list[int] = []
        self._next = 0

    def reserve(self) -> int:
        """Return a new handle."""
        self._next += 1
        return self._next

    def add(self, obj: Any, handle: int) -> None:
        """Register `obj` under `handle`."""
        key = id(obj)

        def forget(_: weakref.ref[Any]) -> None:
            self._handles.pop(key, None)
            self._refs.pop(handle, None)
            self._released.append(handle)

        self._handles[key] = handle
        try:
            self._refs[handle] = weakref.ref(obj, forget)
        except TypeError:
            self._refs[handle] = lambda: obj

    def handle_of(self, obj: Any) -> int | None:
        """Return the handle of `obj`, None if it has none."""
        return self._handles.get(id(obj))

    def object_of(self, handle: int) -> Any:
        """Return the object of a handle, None if the program has dropped it."""
        ref = self._refs.get(handle)
        return None if ref is None else ref()

    def objects(self) -> Iterator[tuple[int, Any]]:
        """Yield handles and living objects, in the order of the handles."""
        for handle in sorted(self._refs):
            obj = self.object_of(handle)
            if obj is not None:
                yield handle, obj

    @property
    def released(self) -> tuple[int, ...]:
        """The handles whose objects are gone."""
        return tuple(self._released)

    def take_released(self, count: int) -> list[int]:
        """Remove the first `count` handles from `released` and return them."""
        taken = self._released[:count]
        del self._released[:count]
        return taken

    def remove(self, handle: int) -> None:
        """Remove a handle and its object from the table."""
        obj = self.object_of(handle)
        self._refs.pop(handle, None)
        self._handles.pop(id(obj), None)

    def clear(self) -> None:
        """Forget every object, without releasing anything."""
        self._refs.clear()
        self._handles.clear()
        self._released.clear()


@final
class ReplicaTable:
    """Handles of one replica's objects. The table keeps the objects alive until the driver releases them.

    Attributes:
        changes: Number of additions and releases so far.
    """

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}
        self._handles: dict[int, int] = {}
        self.changes = 0

    def add(self, handle: int, obj: Any) -> None:
        """Register `obj` under `handle`."""
        self._objects[handle] = obj
        self.changes += 1
        self._handles[id(obj)] = handle

    def release(self, handle: int) -> None:
        """Drop a handle and its object."""
        obj = self._objects.pop(handle, None)
        self.changes += 1
        self._handles.pop(id(obj), None)

    def handle_of(self, obj: Any) -> int | None:
        """Return the handle of `obj`, None if it has none."""
        return self._handles.get(id(obj))

    def object_of(self, handle: int) -> Any:
        """Return the object of a handle."""
        return self._objects[handle]

    def has(self, handle: int) -> bool:
        """Return True if a handle is in the table."""
        return handle in self._objects

    def items(self) -> list[tuple[int, Any]]:
        """Return handles and objects in the order of the handles, which is the same on every replica."""
        return sorted(self._objects.items())
