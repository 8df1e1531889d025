"""An epoch that merges the epochs of a strategy's workers, each of which has an input pipeline on its own node.

Only references and row counts are merged here: rows go from the node that made them to the replicas there. Replicas
weigh by the row counts of all workers. A worker that runs out of data contributes empty batches until every worker is
done; a step without rows on all workers is skipped; an error of a worker takes its own place, and the other workers'
steps follow after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from raydist.actors.epochs.batch_group import BatchGroup
from raydist.actors.epochs.served_epoch import Poll, QueueEntry, ServedEpoch
from raydist.actors.portable_errors import pack_error
from raydist.core.errors import FailedPreconditionError, SpecError
from raydist.core.exception_utils import annotate
from raydist.pipelines.metering.stats import PipelineStats
from raydist.pipelines.run.joined_states import join_workers

if TYPE_CHECKING:
    from raydist.actors.epochs.job import MergedJob
    from raydist.actors.epochs.link import PipelineLink
    from raydist.actors.epochs.served_epoch import Position
    from raydist.pipelines.elements.items import IteratorState


@final
class WorkerFeed:
    """The entries of one worker's queue, used place by place.

    Attributes:
        state: State of the worker's pipeline after the used places.
        used: Number of the next place.
        ended: True if the worker has no more data.
    """

    def __init__(self, state: IteratorState) -> None:
        self.state = state
        self.used = 0
        self.ended = False
        self._entries: deque[QueueEntry] = deque()

    def add(self, entries: Sequence[QueueEntry]) -> None:
        self._entries.extend(entries)

    @property
    def asks_from(self) -> int:
        """The number of the first place that the worker has not sent."""
        return max(self.used, self._entries[-1].end) if self._entries else self.used

    @property
    def holds_last(self) -> bool:
        return self.ended or (bool(self._entries) and self._entries[-1].last)

    @property
    def waits(self) -> bool:
        """Return True if the worker must send an entry before its next place is known."""
        while self._entries and self._entries[0].end <= self.used:
            self._entries.popleft()
        return not self.ended and not self._entries

    @property
    def entry(self) -> QueueEntry:
        """The entry with the next place, which the worker must have sent."""
        if self.waits or self.ended:
            raise FailedPreconditionError(f"raydist bug: a worker must have sent place {self.used}, and has not.")
        return self._entries[0]

    @property
    def group(self) -> BatchGroup:
        """The steps of the next entry, which must have steps."""
        group = self.entry.group
        if group is None:
            raise FailedPreconditionError(f"raydist bug: place {self.used} of a worker must be a step, and is none.")
        return group

    @property
    def place(self) -> int:
        """The position of the next step in its group."""
        return self.used - self.entry.number

    @property
    def num_steps(self) -> int:
        """The number of remaining steps of the group."""
        return len(self.group.rows) - self.place

    def state_after(self, num_places: int) -> IteratorState:
        """Return the state of the worker's pipeline after `num_places` more places of the entry."""
        return self.entry.states[self.place + num_places - 1] or self.state if num_places else self.state

    def use(self, num_places: int) -> None:
        """Use the next `num_places` places of the entry."""
        entry = self.entry
        self.state = self.state_after(num_places)
        self.used += num_places
        self.ended = entry.last and entry.error is None


@final
@dataclass(frozen=True, slots=True)
class _Given:
    """A merged entry: its first place, the first place of each worker, and a flag for each worker that moves on."""

    number: int
    before: tuple[int, ...]
    moving: tuple[bool, ...]


@final
class MergedSteps:
    """The merge of the entries of all workers' queues into the entries of one queue. Pure logic.

    Args:
        starts: Initial state of each worker's pipeline.
        num_replicas: Number of replicas of each worker.
        step: Number of the first step.
    """

    def __init__(self, starts: Sequence[IteratorState], num_replicas: int, step: int = 0) -> None:
        self._feeds = [WorkerFeed(state) for state in starts]
        self._num_replicas = num_replicas
        self._number = 0  # number of the next place
        self._step = step
        self._given: deque[_Given] = deque()

    @property
    def state(self) -> IteratorState:
        """The state after all merged entries so far."""
        return join_workers([feed.state for feed in self._feeds], self._step)

    def add(self, worker: int, entries: Sequence[QueueEntry]) -> None:
        self._feeds[worker].add(entries)

    def missing(self) -> list[int]:
        """Return the workers that must send entries before the next merged entry."""
        return [worker for worker, feed in enumerate(self._feeds) if feed.waits]

    def asks_from(self, worker: int) -> int:
        """Return the number of the first place that `worker` has not sent."""
        return self._feeds[worker].asks_from

    def holds_last(self, worker: int) -> bool:
        return self._feeds[worker].holds_last

    def done_by(self, done: int) -> tuple[int, ...]:
        """Return the number of finished places of each worker for the first `done` merged places. `done` only grows."""
        if done >= self._number:  # with skipped steps without rows, which take up the credit
            return tuple(feed.used for feed in self._feeds)
        while len(self._given) > 1 and self._given[1].number <= done:
            self._given.popleft()
        given = self._given[0]
        moved = max(0, done - given.number)
        return tuple(before + moved * moving for before, moving in zip(given.before, given.moving, strict=True))

    def next_entry(self) -> QueueEntry | None:
        """Return the next merged entry; None if some workers are `missing`."""
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
        """Mark the workers whose data ends here as `ended`; return True if there are any."""
        ending = [feed for feed in live if feed.entry.last]
        for feed in ending:
            feed.use(1)
        return bool(ending)

    def _offer(self, moving: Sequence[WorkerFeed], num_places: int = 1, **what: Any) -> QueueEntry:
        """Return the entry with the next places, and move the feeds in `moving` forward."""
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
        """Return the steps that all workers with data have; None after skipping steps without rows."""
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
        """Return the number of rows of every replica, `count` steps after the next one."""
        none = (0,) * self._num_replicas
        of_workers = [feed.group.rows[feed.place + count] if feed in live else none for feed in self._feeds]
        return tuple(rows for of_worker in of_workers for rows in of_worker)

    def _group_of(self, live: Sequence[WorkerFeed], rows: tuple[tuple[int, ...], ...], lender: int) -> BatchGroup:
        """Return the next steps of all workers. Replicas of ended workers refer to the object of `lender`."""
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


@final
class MergedEpoch(ServedEpoch):
    """An epoch that reads the epochs of all workers as they make steps, and forwards acknowledgements to them.

    Args:
        links: One link per worker.
        job: The merged job.
    """

    def __init__(self, links: Sequence[PipelineLink], job: MergedJob) -> None:
        starts: list[Position] = [link.call("position_of", 0) for link in links]
        step = 0 if job.state is None else int(job.state.get("step", 0))
        self._merged = MergedSteps([start.state for start in starts], job.num_replicas // len(links), step)
        super().__init__(job.num_replicas, self._merged.state, job.label)
        self._links = tuple(links)
        self._wait_s = job.timeouts.poll_s
        self._asked: list[Any] = [None] * len(links)
        self._told = [0] * len(links)  # acknowledged places of each worker
        self._pace_s: float | None = None
        self._stats: PipelineStats | None = None

    def _run(self) -> None:
        try:
            while not self._is_finished():
                if not self._offer_next():
                    self._read()
        except BaseException as error:  # a worker's pipeline is gone or does not answer
            self._fail(error, f"In {self._label}.")
        finally:
            for link in self._links:
                link.close()

    def _is_finished(self) -> bool:
        with self._changed:
            return self._queues.finished

    def _offer_next(self) -> bool:
        """Offer the next entry; return False if a worker must send entries first."""
        with self._changed:
            entry = self._merged.next_entry()
            if entry is not None and not self._queues.closed:
                self._queues.offer(entry)
                self._changed.notify_all()
            return entry is not None

    def _read(self) -> None:
        """Poll all workers, and wait for the answers of the missing ones."""
        for worker, link in enumerate(self._links):
            with self._changed:
                poll = self._poll_of(worker)
            if poll is not None:
                self._asked[worker] = link.ask(poll)
        with self._changed:
            self._acknowledged()  # acknowledgements that came while polls were sent
            missing = self._merged.missing()
        for worker in missing:
            entries = self._receive(worker)
            with self._changed:
                self._merged.add(worker, entries)

    def _poll_of(self, worker: int) -> Poll | None:
        """Return the poll to send to a worker; None if one is pending, or the worker has sent its last entry."""
        if self._asked[worker] is not None or self._merged.holds_last(worker):
            return None
        done = self._told[worker] = self._merged.done_by(self._queues.num_done)[worker]
        return Poll(None, self._merged.asks_from(worker), done, self._wait_s, self._pace_s)

    def _receive(self, worker: int) -> tuple[QueueEntry, ...]:
        try:
            entries = self._links[worker].receive(self._asked[worker])
        except Exception as error:
            annotate(error, f"It made the batches of worker {worker} of {len(self._links)}.")
            raise
        self._asked[worker] = None  # reset last: a pending poll receives acknowledgements
        if worker == 0 and entries and entries[-1].stats is not None:
            self._stats = entries[-1].stats
        return entries

    def _acknowledged(self) -> None:
        """Acknowledge to workers with a pending poll: a worker without credits would otherwise not continue."""
        for worker, done in enumerate(self._merged.done_by(self._queues.num_done)):
            asked = self._asked[worker]
            if asked is not None and done > self._told[worker]:
                self._told[worker] = done
                self._links[worker].acknowledge(asked, None, done)

    def poll(self, poll: Poll) -> tuple[QueueEntry, ...]:
        with self._changed:
            self._pace_s = poll.pace_s if poll.pace_s is not None else self._pace_s
            self._acknowledge(poll.rank, poll.done)
            self._changed.wait_for(lambda: self._queues.ready(poll.start), poll.wait_s)
            return self._queues.take(poll.rank, poll.start)

    def stats(self) -> PipelineStats:
        """Return the statistics of the first worker's pipeline."""
        if self._stats is None:
            stats: PipelineStats = self._links[0].call("stats")
            return stats
        return self._stats

    def close(self) -> None:
        super().close()
        for link in self._links:
            link.close()
