"""One bounded queue per replica over one numbered sequence of places. Pure logic, without I/O.

A *place* is the result of one call of `next`: a step (a global batch cut into pieces), an error, or the end. An *entry*
holds the places of a group of steps, or one other place. The queues keep an entry until every replica has acknowledged
all places in it, so a reader that lost an answer, or a new reader, can ask for the same number again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

from raydist.core.errors import CancelledError, FailedPreconditionError

if TYPE_CHECKING:
    from raydist.actors.epochs.batch_group import BatchGroup
    from raydist.actors.portable_errors import PortableError
    from raydist.pipelines.elements.items import IteratorState
    from raydist.pipelines.metering.stats import PipelineStats


@final
@dataclass(frozen=True, slots=True, eq=False)
class QueueEntry:
    """The results of some consecutive calls of `next`.

    Attributes:
        number: Number of places before this entry.
        states: State of the pipeline after each place.
        group: The steps, one per place; None for an error or the end.
        error: The error at this place; None otherwise.
        last: True if no entry follows; without an error, this entry is the end of the data.
        stats: Statistics of the pipeline's stages, set at the end of the data.
    """

    number: int
    states: tuple[IteratorState, ...]
    group: BatchGroup | None = None
    error: PortableError | None = None
    last: bool = False
    stats: PipelineStats | None = None

    @property
    def end(self) -> int:
        """The number of the place after this entry."""
        return self.number + len(self.states)

    def only(self, rank: int | None) -> QueueEntry:
        """Return this entry with the pieces of replica `rank` only; all pieces for None."""
        return self if rank is None or self.group is None else replace(self, group=self.group.only(rank))


@final
@dataclass(frozen=True, slots=True)
class Position:
    """A reading position: the number of the next place, the state before it, and True in `ended` at the end."""

    number: int
    state: IteratorState
    ended: bool = False


@final
class BatchQueues:
    """The entries between one producer and the replicas (or the driver, which reads for all of them)."""

    def __init__(self, *, num_replicas: int, start: IteratorState) -> None:
        self._entries: deque[QueueEntry] = deque()
        self._bytes: deque[int] = deque()
        self._done = [0] * num_replicas  # each replica is done with the places before this number
        self._first = Position(0, start)  # position of the first entry
        self._ended = False
        self._closed = False

    @property
    def num_offered(self) -> int:
        """The number of the place after the last entry."""
        return self._entries[-1].end if self._entries else self._first.number

    @property
    def num_done(self) -> int:
        """The number of places that every replica has acknowledged."""
        return min(self._done)

    @property
    def num_ahead(self) -> int:
        """The number of offered places that some replica has not acknowledged."""
        return self.num_offered - min(self._done)

    @property
    def num_kept(self) -> int:
        """The number of places in the kept entries: unacknowledged places, and the rest of the group in use."""
        return self.num_offered - self._first.number

    @property
    def num_entries(self) -> int:
        """The number of kept entries: the one in use and the ones after it."""
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """The number of bytes of all kept entries."""
        return sum(self._bytes)

    @property
    def finished(self) -> bool:
        """Return True after the last entry or `close`."""
        return self._ended or self._closed

    @property
    def closed(self) -> bool:
        """Return True once `close` was called."""
        return self._closed

    def offer(self, entry: QueueEntry, num_bytes: int = 0) -> None:
        """Add the next entry. No entry may follow one that is `last`."""
        if self._closed:
            return
        if entry.number != self.num_offered or self._ended:
            raise FailedPreconditionError(
                f"raydist bug: entry {entry.number} must be number {self.num_offered}, and nothing may follow the last."
            )
        self._entries.append(entry)
        self._bytes.append(num_bytes)
        self._ended = entry.last

    def ready(self, start: int) -> bool:
        """Return True if `take` from `start` returns an entry or raises."""
        return self._closed or start < self.num_offered

    def take(self, rank: int | None, start: int) -> tuple[QueueEntry, ...]:
        """Return the entries from place `start` on, with the pieces of replica `rank` (None: all, for the driver).

        Does not remove entries: they can be taken again until they are acknowledged.

        Raises:
            CancelledError: The queues were closed.
            FailedPreconditionError: `start` was acknowledged before.
        """
        if self._closed:
            raise CancelledError(
                f"This iterator was closed (with its strategy, or by close()) and gives no batch {start}. Take a new "
                "one."
            )
        if start < self._first.number:
            raise FailedPreconditionError(
                f"Batch {start} of this iterator cannot be read again: all replicas were done with the first "
                f"{self._first.number}. Resume a new iterator from a saved state instead."
            )
        return tuple(entry.only(rank) for entry in self._entries if entry.end > start)

    def acknowledge(self, rank: int | None, done: int) -> None:
        """Record that replica `rank` (None: every one) has finished the places before `done`, unless it is lower."""
        for replica in range(len(self._done)) if rank is None else (rank,):
            self._done[replica] = max(self._done[replica], min(done, self.num_offered))
        self._drop_done()

    def _drop_done(self) -> None:
        done = min(self._done)
        while self._entries and self._entries[0].end <= done and not self._entries[0].last:
            entry = self._entries.popleft()
            self._bytes.popleft()
            self._first = Position(entry.end, entry.states[-1])

    def reclaim(self) -> Position:
        """Move every reader after the furthest place that any replica has acknowledged; return that position."""
        self.acknowledge(None, max(self._done))
        return self.position_of(0)

    def position_of(self, rank: int) -> Position:
        """Return the position at which replica `rank` continues."""
        done = self._done[rank]
        for entry in self._entries:
            if entry.number < done <= entry.end:
                return Position(done, entry.states[done - 1 - entry.number], entry.last)
        return self._first

    def close(self) -> None:
        """Drop all entries; later calls of `take` raise."""
        self._closed = True
        self._entries.clear()
        self._bytes.clear()
