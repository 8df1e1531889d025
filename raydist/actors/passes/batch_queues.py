"""One bounded queue per replica over one numbered sequence of entries. No input or output in here: the rules alone.

An *entry* is a step (a global batch cut into pieces), the error that stands in its stead, or the end. Entries are kept
until every replica has said that it is done with them, so a reader that lost an answer, or a new reader, asks for the
same number again. The credits are `capacity`: that many entries may be kept, and no more are made until one is dropped.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

from raydist.errors import CancelledError, FailedPreconditionError

if TYPE_CHECKING:
    from raydist.actors.passes.piece import StepBatch
    from raydist.actors.portable_errors import PortableError
    from raydist.pipelines.elements.items import State
    from raydist.pipelines.metering.stats import PipelineStats

__all__ = ["BatchQueues", "QueueEntry", "Position"]


@final
@dataclass(frozen=True, slots=True, eq=False)
class QueueEntry:
    """What one call of `next` gives.

    Attributes:
        number: Steps and errors before this one.
        state: Of the pipeline, after this entry.
        batch: The step, if it is one.
        error: The error raised here, if it is one.
        last: Nothing follows: the end of the data if there is no error.
        stats: What the stages of the pipeline did, told with the end of the data.
    """

    number: int
    state: State
    batch: StepBatch | None = None
    error: PortableError | None = None
    last: bool = False
    stats: PipelineStats | None = None

    def only(self, rank: int | None) -> QueueEntry:
        """This entry as replica `rank` sees it; None for all of it."""
        return self if rank is None or self.batch is None else replace(self, batch=self.batch.only(rank))


@final
@dataclass(frozen=True, slots=True)
class Position:
    """How far reading has come: the number of the next entry, and the pipeline's state before it."""

    number: int
    state: State


@final
class BatchQueues:
    """The entries between one producer and the replicas (or the driver, which reads for all of them)."""

    def __init__(self, *, num_replicas: int, capacity: int, start: State) -> None:
        self._capacity = capacity
        self._entries: deque[QueueEntry] = deque()
        self._done = [0] * num_replicas  # each replica is done with the entries before this number
        self._states: deque[tuple[int, State]] = deque([(0, start)])  # (number, state before it), for `reclaim`
        self._ended = False
        self._closed = False

    @property
    def num_produced(self) -> int:
        """Number of the next entry to be offered."""
        return self._first + len(self._entries)

    @property
    def num_kept(self) -> int:
        """Entries whose pieces are held."""
        return len(self._entries)

    @property
    def _first(self) -> int:
        return self._states[0][0]

    @property
    def wants_more(self) -> bool:
        """Whether there is credit for one more entry."""
        return not (self._ended or self._closed) and len(self._entries) < self._capacity

    @property
    def finished(self) -> bool:
        """Whether nothing will be offered any more."""
        return self._ended or self._closed

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def offer(self, entry: QueueEntry) -> None:
        """Add the next entry. After one that is `last` nothing may follow."""
        if self._closed:
            return
        if entry.number != self.num_produced or self._ended:
            raise FailedPreconditionError(
                f"raydist bug: entry {entry.number} must be number {self.num_produced}, and nothing may follow the "
                "last."
            )
        self._entries.append(entry)
        self._states.append((entry.number + 1, entry.state))
        self._ended = entry.last

    def ready(self, start: int) -> bool:
        """Whether `take` from `start` has something to give (or to raise)."""
        return self._closed or start < self.num_produced

    def take(self, rank: int | None, start: int, most: int) -> tuple[QueueEntry, ...]:
        """Up to `most` entries from number `start` on, as replica `rank` (None: the driver) sees them.

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
        if start < self._first:
            raise FailedPreconditionError(
                f"Batch {start} of this iterator cannot be read again: all replicas were done with the first "
                f"{self._first}. Resume a new iterator from a saved state instead."
            )
        offset = start - self._first
        return tuple(self._entries[i].only(rank) for i in range(offset, min(offset + most, len(self._entries))))

    def acknowledge(self, rank: int | None, done: int) -> None:
        """Replica `rank` (None: every replica) is done with the entries before `done`. Older news are ignored."""
        for replica in range(len(self._done)) if rank is None else (rank,):
            self._done[replica] = max(self._done[replica], min(done, self.num_produced))
        self._drop_done()

    def _drop_done(self) -> None:
        done = min(self._done)
        while self._entries and self._entries[0].number < done and not self._entries[0].last:
            self._entries.popleft()
            self._states.popleft()

    def reclaim(self) -> Position:
        """Go on, for every reader, after the furthest entry that any replica is done with."""
        self.acknowledge(None, max(self._done))
        return Position(*self._states[0])

    def position_of(self, rank: int) -> Position:
        """Where replica `rank` goes on."""
        return Position(*self._states[self._done[rank] - self._first])

    def close(self) -> None:
        """Drop everything; later takes raise."""
        self._closed = True
        self._entries.clear()
