"""The slices that a worker knows, and the versions of values that it has read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from raydist.parameter_servers.slices import ServedSlice

__all__ = ["ReadVersions", "SliceTable"]

NEVER = -1


@final
class SliceTable:
    """All slices planned so far."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[ServedSlice, ...]] = {}

    def add(self, slices: Iterable[ServedSlice]) -> list[int]:
        """Add slices of new variables; return the handles of these variables."""
        found: dict[int, list[ServedSlice]] = {}
        for each in slices:
            if each.handle not in self._of:
                found.setdefault(each.handle, []).append(each)
        for handle, parts in found.items():
            self._of[handle] = tuple(sorted(parts, key=lambda part: part.begin))
        return list(found)

    def __contains__(self, handle: int) -> bool:
        return handle in self._of

    def handles(self) -> list[int]:
        """Return the handles of all variables that have slices."""
        return list(self._of)

    def of(self, handle: int) -> tuple[ServedSlice, ...]:
        """Return a variable's slices, in the order of their rows."""
        return self._of[handle]

    def forget(self, handle: int) -> tuple[ServedSlice, ...]:
        """Remove a variable; return its slices."""
        return self._of.pop(handle, ())


@final
class ReadVersions:
    """The versions of one server's slices that a worker holds, and the newest version that it knows.

    >>> read = ReadVersions()
    >>> read.note([1, 2], 5)
    >>> read.note_change([1], 6)  # nobody else changed anything: slice 2 is as it was
    >>> read.older_than(6), read.older_than(7), read.newest
    ([], [1, 2], 6)
    """

    def __init__(self) -> None:
        self.newest = 0
        self._at: dict[int, int] = {}

    def add(self, numbers: Iterable[int]) -> None:
        """Add slices that were not read yet."""
        for number in numbers:
            self._at.setdefault(number, NEVER)

    def drop(self, numbers: Iterable[int]) -> None:
        """Remove slices."""
        for number in numbers:
            self._at.pop(number, None)

    def forget(self, numbers: Iterable[int] | None = None) -> None:
        """Mark these slices, or all, as not read."""
        self._at.update(dict.fromkeys(list(self._at) if numbers is None else numbers, NEVER))

    def is_of(self, number: int, version: int) -> bool:
        """Return True if the worker holds this version of a slice."""
        return self._at.get(number, NEVER) == version

    def note(self, numbers: Sequence[int], version: int) -> None:
        """Record that slices were read in a version."""
        self._at.update(dict.fromkeys(numbers, version))
        self.newest = max(self.newest, version)

    def note_change(self, numbers: Sequence[int], version: int) -> None:
        """Record that this worker's change of slices made a version, and that it holds the changed values."""
        before = version - 1
        if self.newest == before:
            self._at = {number: version if at == before else at for number, at in self._at.items()}
        self.note(numbers, version)

    def older_than(self, version: int) -> list[int]:
        """Return the slices of which an older version is held."""
        return [number for number, at in self._at.items() if at < version]

    def oldest(self, numbers: Iterable[int]) -> int:
        """Return the oldest version that is held of some slices."""
        return min((self._at.get(number, NEVER) for number in numbers), default=self.newest)
