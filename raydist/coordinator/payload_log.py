"""The log of the driver's changes, in order, and how much of it each worker has received."""

from __future__ import annotations

from collections.abc import Hashable
from typing import final

__all__ = ["StepPayloadLog"]


@final
class StepPayloadLog:
    """Entries that every worker must receive before closures scheduled after them.

    A restarted worker receives all entries. An entry whose effect a later entry replaces (a learning rate, set every
    step) is dropped once all living workers have received it: so the log stays short.

    Args:
        num_workers: Number of workers.
    """

    def __init__(self, num_workers: int) -> None:
        self._entries: dict[int, bytes] = {}
        self._repeats: dict[int, frozenset[Hashable]] = {}
        self._end = 0
        self._had = [0] * num_workers

    @property
    def end(self) -> int:
        """Number of entries appended so far."""
        return self._end

    @property
    def num_held(self) -> int:
        """Number of entries that a new worker receives."""
        return len(self._entries)

    def append(self, entry: bytes, what: frozenset[Hashable] = frozenset()) -> None:
        """Append an entry.

        Args:
            entry: The packed entry.
            what: All settings that the entry changes, if a later entry with the same settings replaces it entirely.
        """
        self._entries[self._end] = entry
        if what:
            self._repeats[self._end] = what
        self._end += 1
        self._compact()

    def due(self, worker: int, before: int) -> list[bytes]:
        """Return the entries before position `before` that a worker has not received, and mark them as received."""
        if not self._had[worker]:
            before = self._end  # an entry that a later one replaces may be gone: the worker gets the later one, too
        begin, self._had[worker] = self._had[worker], max(before, self._had[worker])
        if begin >= before:
            return []
        return [entry for place, entry in self._entries.items() if begin <= place < before]

    def restarted(self, worker: int) -> None:
        """Mark a worker as having received nothing."""
        self._had[worker] = 0

    def _compact(self) -> None:
        # Restarted workers (0) are left out: `due` sends them what is left, in order.
        common = min((had for had in self._had if had), default=0)
        newer: set[Hashable] = set()
        for place in sorted(self._repeats, reverse=True):
            what = self._repeats[place]
            if place < common and what <= newer:
                del self._entries[place], self._repeats[place]
            newer |= what
