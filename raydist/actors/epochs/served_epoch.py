"""An epoch whose thread offers entries, which replicas or the driver take by long poll, and the queues between them.

A *place* is the result of one call of `next`: a step (a global batch cut into pieces), an error, or the end. An *entry*
holds the places of a group of steps, or one other place. The queues keep an entry until every replica has acknowledged
all places in it, so a reader that lost an answer, or a new reader, can ask for the same number again.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

from raydist.actors.portable_errors import pack_error
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
    """One bounded queue per replica over one sequence of entries. The driver reads for all replicas.

    Pure logic, without I/O and locks.
    """

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


@final
@dataclass(frozen=True, slots=True)
class Poll:
    """A reader's request for entries.

    Attributes:
        rank: The replica that asks; None for the driver, which asks for all replicas.
        start: Number of the first requested place.
        done: The reader has finished the places before this number, and has work until `start`.
        wait_s: Limit for the wait in seconds; the answer is empty if no entry comes in time.
        pace_s: Mean seconds of the reader's recent work on a step; None if there was none.
    """

    rank: int | None
    start: int
    done: int
    wait_s: float
    pace_s: float | None = None

    @property
    def has_work_s(self) -> float:
        """The estimated seconds until the reader runs out of work."""
        return (self.start - self.done) * (self.pace_s or 0.0)


class ServedEpoch(ABC):
    """An epoch whose thread offers entries, which readers take and acknowledge. Thread-safe.

    Args:
        num_replicas: Number of readers.
        start: State before the first place.
        label: Name of the epoch, for messages.

    Attributes:
        starved_s: Seconds that readers waited for an entry without work, summed over readers.
    """

    def __init__(self, num_replicas: int, start: IteratorState, label: str) -> None:
        self._label = label
        self.starved_s = 0.0
        self._changed = threading.Condition()
        self._loans = [0] * num_replicas  # number of loops sent to each replica that it has not left
        self._queues = BatchQueues(num_replicas=num_replicas, start=start)
        self._thread = threading.Thread(target=self._run, name=f"raydist-input-{label}", daemon=True)

    @final
    def start(self) -> None:
        self._thread.start()

    @abstractmethod
    def _run(self) -> None:
        """Offer entries until the last, or until the epoch is closed. Must not raise."""

    @abstractmethod
    def poll(self, poll: Poll) -> tuple[QueueEntry, ...]:
        """Return the next entries for a reader. Blocks up to `wait_s` for the first one."""

    @abstractmethod
    def stats(self) -> PipelineStats:
        """Return the statistics of the pipeline's stages so far."""

    @final
    def _offer(self, states: tuple[Any, ...], *, num_bytes: int = 0, **what: Any) -> None:
        with self._changed:
            if not self._queues.finished:
                self._queues.offer(QueueEntry(self._queues.num_offered, states, **what), num_bytes)
            self._changed.notify_all()

    @final
    def _fail(self, error: BaseException, *notes: str) -> None:
        """Offer an error as the last entry: no batch may be skipped."""
        self._offer(({},), error=pack_error(error, *notes), last=True)

    @final
    def _acknowledge(self, rank: int | None, done: int) -> None:
        self._queues.acknowledge(rank, done)
        self._acknowledged()
        self._changed.notify_all()

    @abstractmethod
    def _acknowledged(self) -> None:
        """Handle an acknowledgement. Called with `_changed` held."""

    @final
    def acknowledge(self, rank: int | None, done: int) -> None:
        """Record that replica `rank` (None: every one) has finished the places before `done`."""
        with self._changed:
            self._acknowledge(rank, done)

    @final
    def lend(self, done: int) -> None:
        """Lend the epoch to the replicas after the driver finished the places before `done`; each must `release` it."""
        with self._changed:
            self._acknowledge(None, done)
            self._loans = [loans + 1 for loans in self._loans]

    @final
    def release(self, rank: int, done: int) -> None:
        """Record that replica `rank` stops reading for now, and has finished the places before `done`."""
        with self._changed:
            self._acknowledge(rank, done)
            self._loans[rank] = max(0, self._loans[rank] - 1)

    @final
    @property
    def in_use(self) -> bool:
        """Return True while a replica reads the epoch, or will begin to."""
        with self._changed:
            return any(self._loans) and not self._queues.closed

    @final
    def position_of(self, rank: int) -> Position:
        with self._changed:
            return self._queues.position_of(rank)

    @final
    def reclaim(self) -> Position:
        """Move all readers to the place where the furthest replica stopped, and return that position."""
        with self._changed:
            self._loans = [0] * len(self._loans)
            position = self._queues.reclaim()
            self._acknowledged()
            self._changed.notify_all()
            return position

    @final
    def num_kept(self) -> int:
        with self._changed:
            return self._queues.num_kept

    def close(self) -> None:
        """Stop producing; every pending or later poll raises CancelledError. Does not block: see `join`."""
        with self._changed:
            self._queues.close()
            self._changed.notify_all()

    @final
    def join(self, timeout_s: float) -> bool:
        """Block until the thread has ended; return False if it has not within `timeout_s`."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()
