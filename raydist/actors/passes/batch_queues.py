"""One bounded queue per replica over one numbered sequence of places. No input or output in here: the rules alone.

A *place* is what one call of `next` gives: a step (a global batch cut into pieces), the error that stands in its stead,
or the end. An *entry* holds the places of a group of steps, or one other place. Entries are kept until every replica
has said that it is done with all of their places, so a reader that lost an answer, or a new reader, asks for the same
number again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

from raydist.errors import CancelledError, FailedPreconditionError

if TYPE_CHECKING:
    from raydist.actors.passes.batch_group import BatchGroup
    from raydist.actors.portable_errors import PortableError
    from raydist.pipelines.elements.items import IteratorState
    from raydist.pipelines.metering.stats import PipelineStats

__all__ = ["BatchQueues", "QueueEntry", "Position"]


@final
@dataclass(frozen=True, slots=True, eq=False)
class QueueEntry:
    """What some consecutive calls of `next` give.

    Attributes:
        number: Places before this entry.
        states: Of the pipeline, after each place.
        group: The steps, if it is steps: one a place.
        error: The error raised here, if it is one.
        last: Nothing follows: the end of the data if there is no error.
        stats: What the stages of the pipeline did, told with the end of the data.
    """

    number: int
    states: tuple[IteratorState, ...]
    group: BatchGroup | None = None
    error: PortableError | None = None
    last: bool = False
    stats: PipelineStats | None = None

    @property
    def end(self) -> int:
        """Number of the place behind this entry."""
        return self.number + len(self.states)

    def only(self, rank: int | None) -> QueueEntry:
        """This entry as replica `rank` sees it; None for all of it."""
        return self if rank is None or self.group is None else replace(self, group=self.group.only(rank))


@final
@dataclass(frozen=True, slots=True)
class Position:
    """How far reading has come: number of the next place, the pipeline's state before it, whether it is the end."""

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
        self._first = Position(0, start)  # of the entries
        self._ended = False
        self._closed = False

    @property
    def num_offered(self) -> int:
        """Number of the place behind the last entry."""
        return self._entries[-1].end if self._entries else self._first.number

    @property
    def num_done(self) -> int:
        """Places that every replica is done with."""
        return min(self._done)

    @property
    def num_ahead(self) -> int:
        """Places that a replica is not done with."""
        return self.num_offered - min(self._done)

    @property
    def num_kept(self) -> int:
        """Places whose pieces are held: those ahead, and what else is in the group in use."""
        return self.num_offered - self._first.number

    @property
    def num_entries(self) -> int:
        """Entries that are held: the one that is in use, and those after it."""
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Bytes of what is held."""
        return sum(self._bytes)

    @property
    def finished(self) -> bool:
        """Whether nothing will be offered any more."""
        return self._ended or self._closed

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def offer(self, entry: QueueEntry, num_bytes: int = 0) -> None:
        """Add the next entry. After one that is `last` nothing may follow."""
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
        """Whether `take` from `start` has something to give (or to raise)."""
        return self._closed or start < self.num_offered

    def take(self, rank: int | None, start: int) -> tuple[QueueEntry, ...]:
        """The entries from the one with place `start` on, as replica `rank` (None: the driver) sees them.

        Taking changes nothing: the same entries can be taken again until they are acknowledged.

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
        """Replica `rank` (None: every replica) is done with the places before `done`. Older news are ignored."""
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
        """Go on, for every reader, after the furthest place that any replica is done with."""
        self.acknowledge(None, max(self._done))
        return self.position_of(0)

    def position_of(self, rank: int) -> Position:
        """Where replica `rank` goes on."""
        done = self._done[rank]
        for entry in self._entries:
            if entry.number < done <= entry.end:
                return Position(done, entry.states[done - 1 - entry.number], entry.last)
        return self._first

    def close(self) -> None:
        """Drop everything; later takes raise."""
        self._closed = True
        self._entries.clear()
        self._bytes.clear()
