"""The base class of epochs: a thread offers entries, and replicas or the driver take them by long poll."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from raydist.actors.epochs.batch_queues import BatchQueues, QueueEntry
from raydist.actors.portable_errors import pack_error

if TYPE_CHECKING:
    from raydist.actors.epochs.batch_queues import Position
    from raydist.pipelines.elements.items import IteratorState
    from raydist.pipelines.metering.stats import PipelineStats


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
        """Start the thread."""
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
        """Return the position at which replica `rank` continues."""
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
        """Return the number of places in the kept entries."""
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
