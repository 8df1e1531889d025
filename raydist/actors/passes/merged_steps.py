"""The steps of several workers' input pipelines as one: step k is step k of each of them. The rules alone, no waiting.

Row counts and the end of data meet here, so that replicas weigh each other by the rows of all of them. A worker whose
data has ended hands out no rows until all have ended; a step in which nobody has rows is passed over; an error of a
worker takes a place of its own, and the steps of the others wait behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from raydist.actors.passes.batch_group import BatchGroup
from raydist.actors.passes.batch_queues import QueueEntry
from raydist.actors.passes.worker_feed import WorkerFeed
from raydist.actors.portable_errors import pack_error
from raydist.errors import SpecError
from raydist.pipelines.run.joined_states import join_workers

if TYPE_CHECKING:
    from raydist.pipelines.elements.items import IteratorState

__all__ = ["MergedSteps"]


@final
@dataclass(frozen=True, slots=True)
class _Given:
    """An entry that was given: the number of its first place and each worker's, and which workers move on with it."""

    number: int
    before: tuple[int, ...]
    moving: tuple[bool, ...]


@final
class MergedSteps:
    """Takes the entries of each worker's queue, and gives those of the queue of all of them.

    Args:
        starts: The state of each worker's pipeline at the beginning.
        num_replicas: Of each worker.
        step: Number of the first step.
    """

    def __init__(self, starts: Sequence[IteratorState], num_replicas: int, step: int = 0) -> None:
        self._feeds = [WorkerFeed(state) for state in starts]
        self._num_replicas = num_replicas
        self._number = 0  # of the next place
        self._step = step
        self._given: deque[_Given] = deque()

    @property
    def state(self) -> IteratorState:
        """After everything that was given."""
        return join_workers([feed.state for feed in self._feeds], self._step)

    def add(self, worker: int, entries: Sequence[QueueEntry]) -> None:
        """What the queue of `worker` gave."""
        self._feeds[worker].add(entries)

    def missing(self) -> list[int]:
        """The workers that must be asked before there is a next entry."""
        return [worker for worker, feed in enumerate(self._feeds) if feed.waits]

    def asks_from(self, worker: int) -> int:
        """Number of the first place that `worker` has not given."""
        return self._feeds[worker].asks_from

    def holds_last(self, worker: int) -> bool:
        """Whether `worker` has given all that it will ever give."""
        return self._feeds[worker].holds_last

    def done_by(self, done: int) -> tuple[int, ...]:
        """How many places of each worker are done with when the first `done` places are. `done` never goes back."""
        while len(self._given) > 1 and self._given[1].number <= done:
            self._given.popleft()
        if not self._given:
            return (0,) * len(self._feeds)
        given = self._given[0]
        moved = max(0, done - given.number)
        return tuple(before + moved * moving for before, moving in zip(given.before, given.moving, strict=True))

    def next_entry(self) -> QueueEntry | None:
        """The next entry; None where some workers are `missing`."""
        while not self.missing():
            live = [feed for feed in self._feeds if not feed.ended]
            if not live:
                return self._offer((), last=True)
            failed = next((feed for feed in live if feed.entry.error is not None), None)
            if failed is not None:
                return self._offer([failed], error=failed.entry.error, last=failed.entry.last)
            found = self._end_of(live) or self._steps_of(live)
            if isinstance(found, QueueEntry):
                return found
        return None

    def _end_of(self, live: Sequence[WorkerFeed]) -> bool:
        """Whether the data of some workers ends here; then they are `ended`."""
        ending = [feed for feed in live if feed.entry.last]
        for feed in ending:
            feed.use(1)
        return bool(ending)

    def _offer(self, moving: Sequence[WorkerFeed], num_places: int = 1, **what: Any) -> QueueEntry:
        """The entry with the next places, in which the feeds of `moving` move on."""
        before = tuple(feed.used for feed in self._feeds)
        self._given.append(_Given(self._number, before, tuple(feed in moving for feed in self._feeds)))
        states = tuple(self._state_after(moving, count + 1) for count in range(num_places))
        for feed in moving:
            feed.use(num_places)
        entry = QueueEntry(self._number, states, **what)
        self._number, self._step = entry.end, self._step + num_places
        return entry

    def _state_after(self, moving: Sequence[WorkerFeed], num_places: int) -> IteratorState:
        states = [feed.state_after(num_places) if feed in moving else feed.state for feed in self._feeds]
        return join_workers(states, self._step + (num_places if moving else 0))

    def _steps_of(self, live: Sequence[WorkerFeed]) -> QueueEntry | None:
        """Steps that all workers with data have; None where nobody had rows, and they were passed over."""
        if len({feed.group.structure for feed in live}) > 1:
            return self._offer((), error=pack_error(_structures_differ(live)), last=True)
        rows = [self._rows_of(live, count) for count in range(min(feed.num_steps for feed in live))]
        empty = next((count for count, counts in enumerate(rows) if any(counts)), len(rows))
        if empty:
            for feed in live:
                feed.use(empty)
            return None
        lender = next(rank for rank, count in enumerate(rows[0]) if count)
        needs_lender = len(live) < len(self._feeds)
        stop = next((n for n, each in enumerate(rows) if not (each[lender] if needs_lender else any(each))), len(rows))
        return self._offer(live, stop, group=self._group_of(live, tuple(rows[:stop]), lender))

    def _rows_of(self, live: Sequence[WorkerFeed], count: int) -> tuple[int, ...]:
        """The rows of every replica in the next step but `count`."""
        none = (0,) * self._num_replicas
        of_workers = [feed.group.rows[feed.place + count] if feed in live else none for feed in self._feeds]
        return tuple(rows for of_worker in of_workers for rows in of_worker)

    def _group_of(self, live: Sequence[WorkerFeed], rows: tuple[tuple[int, ...], ...], lender: int) -> BatchGroup:
        """The next steps of all workers. Replicas whose worker has ended borrow the object of `lender`."""
        worker, local = divmod(lender, self._num_replicas)
        lent, span = self._feeds[worker].group.refs[local], _span_of(self._feeds[worker])
        refs = [
            ref for feed in self._feeds for ref in (feed.group.refs if feed in live else (lent,) * self._num_replicas)
        ]
        spans = [_span_of(feed) if feed in live else span for feed in self._feeds for _ in range(self._num_replicas)]
        borrowed = [rank for rank in range(len(refs)) if self._feeds[rank // self._num_replicas] not in live]
        structure = self._feeds[worker].group.structure
        return BatchGroup(self._step, tuple(refs), rows, structure, tuple(spans), frozenset(borrowed))


def _span_of(feed: WorkerFeed) -> tuple[int, int]:
    return feed.place, len(feed.group.rows)


def _structures_differ(live: Sequence[WorkerFeed]) -> SpecError:
    shown = sorted({str(feed.group.structure.paths()) for feed in live})
    return SpecError(
        f"The elements of all workers must have the same structure, but their leaves are {' and '.join(shown)}. Let "
        "the dataset function make the same elements for every InputContext."
    )
