"""What all passes share: a thread that offers entries, and replicas or the driver that take them by long poll."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from raydist.actors.passes.batch_queues import BatchQueues, QueueEntry
from raydist.actors.portable_errors import pack_error

if TYPE_CHECKING:
    from raydist.actors.passes.batch_queues import Position
    from raydist.pipelines.elements.items import IteratorState
    from raydist.pipelines.metering.stats import PipelineStats

__all__ = ["Poll", "ServedPass"]


@final
@dataclass(frozen=True, slots=True)
class Poll:
    """A reader's question for more.

    Attributes:
        rank: The replica that asks; None: the driver, for all of them.
        start: Number of the first place wanted.
        done: The reader is done with the places before this number, and has work until `start`.
        wait_s: How long the answer may be waited for; an answer without entries is none yet.
        pace_s: Seconds of work that a step lately was for the reader; None where it has not done any.
    """

    rank: int | None
    start: int
    done: int
    wait_s: float
    pace_s: float | None = None

    @property
    def has_work_s(self) -> float:
        """How long the reader can do without an answer, as far as it knows."""
        return (self.start - self.done) * (self.pace_s or 0.0)


class ServedPass(ABC):
    """A thread offers entries; readers take and acknowledge them. Methods may be called from any thread.

    Args:
        num_replicas: Readers that take part.
        start: The state in front of the first place.
        label: Of the pass, for messages.

    Attributes:
        starved_s: Seconds that readers waited for an entry and had no work, of all readers together.
    """

    def __init__(self, num_replicas: int, start: IteratorState, label: str) -> None:
        self._label = label
        self.starved_s = 0.0
        self._changed = threading.Condition()
        self._loans = [0] * num_replicas  # loops that each replica has been sent and has not left
        self._queues = BatchQueues(num_replicas=num_replicas, start=start)
        self._thread = threading.Thread(target=self._run, name=f"raydist-input-{label}", daemon=True)

    @final
    def start(self) -> None:
        """Begin to produce."""
        self._thread.start()

    @abstractmethod
    def _run(self) -> None:
        """Offer entries until the last, or until the pass is closed. Must not raise."""

    @abstractmethod
    def poll(self, poll: Poll) -> tuple[QueueEntry, ...]:
        """The next entries for a reader. Waits up to `wait_s` for the first one."""

    @abstractmethod
    def stats(self) -> PipelineStats:
        """What the stages of the pipeline did so far."""

    @final
    def _offer(self, states: tuple[Any, ...], *, num_bytes: int = 0, **what: Any) -> None:
        with self._changed:
            if not self._queues.finished:
                self._queues.offer(QueueEntry(self._queues.num_offered, states, **what), num_bytes)
            self._changed.notify_all()

    @final
    def _fail(self, error: BaseException, *notes: str) -> None:
        """No batch may be passed over: nothing follows."""
        self._offer(({},), error=pack_error(error, *notes), last=True)

    @final
    def _acknowledge(self, rank: int | None, done: int) -> None:
        self._queues.acknowledge(rank, done)
        self._acknowledged()
        self._changed.notify_all()

    @abstractmethod
    def _acknowledged(self) -> None:
        """Called with `_changed` held when readers have told how far they are."""

    @final
    def acknowledge(self, rank: int | None, done: int) -> None:
        """Replica `rank` (None: every one) is done with the places before `done`, says a reader whose poll waits."""
        with self._changed:
            self._acknowledge(rank, done)

    @final
    def lend(self, done: int) -> None:
        """The driver, done with the places before `done`, leaves the reading to the replicas: each will `release`."""
        with self._changed:
            self._acknowledge(None, done)
            self._loans = [loans + 1 for loans in self._loans]

    @final
    def release(self, rank: int, done: int) -> None:
        """Replica `rank` stops reading for now, done with the places before `done`."""
        with self._changed:
            self._acknowledge(rank, done)
            self._loans[rank] = max(0, self._loans[rank] - 1)

    @final
    @property
    def in_use(self) -> bool:
        """Whether a replica still reads, or is yet to begin."""
        with self._changed:
            return any(self._loans) and not self._queues.closed

    @final
    def position_of(self, rank: int) -> Position:
        """Where replica `rank` goes on reading."""
        with self._changed:
            return self._queues.position_of(rank)

    @final
    def reclaim(self) -> Position:
        """The driver goes on, for everybody, where the furthest replica stopped."""
        with self._changed:
            self._loans = [0] * len(self._loans)
            position = self._queues.reclaim()
            self._acknowledged()
            self._changed.notify_all()
            return position

    @final
    def num_kept(self) -> int:
        """Places whose pieces are held."""
        with self._changed:
            return self._queues.num_kept

    def close(self) -> None:
        """Stop producing; every waiting or later poll raises CancelledError. Does not wait: see `join`."""
        with self._changed:
            self._queues.close()
            self._changed.notify_all()

    @final
    def join(self, timeout_s: float) -> bool:
        """Wait until the thread has ended; False if a user's function still keeps it busy."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()
