"""What the driver's program has done, in order, and how much of it each worker has had. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from typing import final

__all__ = ["ShipmentLog"]


@final
class ShipmentLog:
    """Entries that every worker must have had before what was scheduled after them.

    A worker that starts again is given all of them. An entry that does nothing but what a later one does again (a
    learning rate, set for every step) is dropped once all workers that live have had it: so the log stays short.

    Args:
        num_workers: All of them.
    """

    def __init__(self, num_workers: int) -> None:
        self._entries: dict[int, bytes] = {}
        self._repeats: dict[int, frozenset[Hashable]] = {}
        self._end = 0
        self._had = [0] * num_workers

    @property
    def end(self) -> int:
        """How many entries there were."""
        return self._end

    @property
    def num_held(self) -> int:
        """How many of them a new worker is given."""
        return len(self._entries)

    def append(self, entry: bytes, what: frozenset[Hashable] = frozenset()) -> None:
        """The program has done something.

        Args:
            entry: That.
            what: Everything that it changes, where all of this is replaced by an entry of the same.
        """
        self._entries[self._end] = entry
        if what:
            self._repeats[self._end] = what
        self._end += 1
        self._compact()

    def due(self, worker: int, before: int) -> list[bytes]:
        """The entries up to place `before` that a worker has not been sent. It is taken to have them now."""
        if not self._had[worker]:
            before = self._end  # an entry that a later one replaces may be gone: so it gets that as well
        begin, self._had[worker] = self._had[worker], max(before, self._had[worker])
        if begin >= before:
            return []
        return [entry for place, entry in self._entries.items() if begin <= place < before]

    def restarted(self, worker: int) -> None:
        """A worker begins from nothing."""
        self._had[worker] = 0

    def _compact(self) -> None:
        # Workers that start again hold nothing: those that are on their way need what is left in order, no more.
        common = min((had for had in self._had if had), default=0)
        newer: set[Hashable] = set()
        for place in sorted(self._repeats, reverse=True):
            what = self._repeats[place]
            if place < common and what <= newer:
                del self._entries[place], self._repeats[place]
            newer |= what
