"""One pass over a distributed dataset: a thread makes steps while credits last, readers take them by long poll."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from raydist.actors.passes.batch_queues import BatchQueues, Position, QueueEntry
from raydist.actors.passes.piece import store_step
from raydist.actors.portable_errors import pack_error
from raydist.errors import CancelledError, DeadlineExceededError, UnavailableError
from raydist.pipelines.metering.stats import PipelineStats
from raydist.pipelines.run.steps import StepSource

__all__ = ["Poll", "Production"]

# After these there is no sense in going on: a worker is gone or stuck, and every later element would tell the same.
_FATAL = (UnavailableError, DeadlineExceededError, CancelledError)


def _nothing() -> None:
    """No more to do at the end."""


@final
@dataclass(frozen=True, slots=True)
class Poll:
    """A reader's question for more.

    Attributes:
        rank: The replica that asks; None: the driver, for all of them.
        start: Number of the first entry wanted.
        done: The reader is done with the entries before this number.
        most: Places wanted at most.
        wait_s: How long the answer may be waited for; an answer without entries is none yet.
    """

    rank: int | None
    start: int
    done: int
    most: int
    wait_s: float


@final
class Production:
    """Runs a step source in a thread of its own, at most `capacity` entries ahead of the slowest reader.

    `put` stores a piece and returns its reference; `on_end` is called once, by the thread, when the source is closed.
    Methods may be called from any thread.
    """

    def __init__(
        self,
        source: StepSource,
        put: Callable[[Any], Any],
        *,
        num_replicas: int,
        capacity: int,
        zero_copy: bool,
        label: str,
        on_end: Callable[[], None] = _nothing,
    ) -> None:
        self._source = source
        self._put = put
        self._zero_copy = zero_copy
        self._label = label
        self._on_end = on_end
        self._ended = False
        self._changed = threading.Condition()
        self._loans = [0] * num_replicas  # loops that each replica has been sent and has not left
        self._queues = BatchQueues(num_replicas=num_replicas, capacity=capacity, start=source.state_dict())
        self._thread = threading.Thread(target=self._run, name=f"raydist-input-{label}", daemon=True)

    def start(self) -> None:
        """Begin to produce."""
        self._thread.start()

    def _run(self) -> None:
        number = 0
        try:
            while self._await_credit():
                entry = self._make_entry(number)
                if entry.last:
                    self._end()  # before a reader knows: what it opens next finds everything given back
                self._offer(entry)
                number += 1
        except Exception as error:  # not of an element: the object store is full, say. No batch may be passed over
            self._offer(QueueEntry(number, {}, error=pack_error(error), last=True))
        finally:
            self._end()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._source.close()
            self._on_end()

    def _offer(self, entry: QueueEntry) -> None:
        with self._changed:
            self._queues.offer(entry)
            self._changed.notify_all()

    def _await_credit(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._queues.wants_more or self._queues.finished)
            return not self._queues.finished

    def _make_entry(self, number: int) -> QueueEntry:
        step = self._source.step
        try:
            cuts = self._source.next_step()
        except StopIteration:
            return QueueEntry(number, self._source.state_dict(), last=True, stats=self._source.stats())
        except Exception as error:
            packed = pack_error(error, f"In {self._label}, step {step}.")
            return QueueEntry(number, self._source.state_dict(), error=packed, last=isinstance(error, _FATAL))
        batch = store_step(cuts, step=step, structure=self._source.structure, put=self._put, zero_copy=self._zero_copy)
        return QueueEntry(number, self._source.state_dict(), batch=batch)

    def poll(self, poll: Poll) -> tuple[QueueEntry, ...]:
        """The next entries for a reader. Waits up to `wait_s` for the first one."""
        with self._changed:
            self._acknowledge(poll.rank, poll.done)
            self._changed.wait_for(lambda: self._queues.ready(poll.start), timeout=poll.wait_s)
            return self._queues.take(poll.rank, poll.start, poll.most)

    def _acknowledge(self, rank: int | None, done: int) -> None:
        self._queues.acknowledge(rank, done)
        self._changed.notify_all()

    def lend(self, done: int) -> None:
        """The driver, done with the entries before `done`, leaves the reading to the replicas: each will `release`."""
        with self._changed:
            self._acknowledge(None, done)
            self._loans = [loans + 1 for loans in self._loans]

    def release(self, rank: int, done: int) -> None:
        """Replica `rank` stops reading for now, done with the entries before `done`."""
        with self._changed:
            self._acknowledge(rank, done)
            self._loans[rank] = max(0, self._loans[rank] - 1)

    @property
    def in_use(self) -> bool:
        """Whether a replica still reads, or is yet to begin."""
        with self._changed:
            return any(self._loans) and not self._queues.closed

    def position_of(self, rank: int) -> Position:
        """Where replica `rank` goes on reading."""
        with self._changed:
            return self._queues.position_of(rank)

    def reclaim(self) -> Position:
        """The driver goes on, for everybody, where the furthest replica stopped."""
        with self._changed:
            self._loans = [0] * len(self._loans)
            position = self._queues.reclaim()
            self._changed.notify_all()
            return position

    def num_kept(self) -> int:
        """Places whose pieces are held."""
        with self._changed:
            return self._queues.num_kept

    def stats(self) -> PipelineStats:
        """What the stages of the pipeline did so far."""
        return self._source.stats()

    def close(self) -> None:
        """Stop producing; every waiting or later poll raises CancelledError. Does not wait: see `join`."""
        with self._changed:
            self._queues.close()
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait until the thread has ended; False if a user's function still keeps it busy."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()
