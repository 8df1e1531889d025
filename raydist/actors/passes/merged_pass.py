"""One pass over the data of several workers, each of which has an input pipeline on its own node.

Only references and row counts come together here: rows go from the node that made them to the replicas there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, final

from raydist.actors.passes.merged_steps import MergedSteps
from raydist.actors.passes.served_pass import Poll, ServedPass
from raydist.foreign_errors import annotate
from raydist.pipelines.metering.stats import PipelineStats

if TYPE_CHECKING:
    from raydist.actors.passes.batch_queues import Position, QueueEntry
    from raydist.actors.passes.job import MergedJob

__all__ = ["MergedPass", "WorkerLink"]


class WorkerLink(Protocol):
    """One worker's pass: `actors.passes.link.PipelineLink`."""

    def call(self, method: str, *args: Any) -> Any:
        """A method of the pass; waits for its answer."""

    def ask(self, poll: Poll) -> Any:
        """Send a poll without waiting."""

    def receive(self, asked: Any) -> tuple[QueueEntry, ...]:
        """The answer to a poll: empty when there is nothing yet."""

    def acknowledge(self, asked: Any, rank: int | None, done: int) -> None:
        """Tell how far the readers are while a poll waits. Does not wait."""

    def close(self) -> None:
        """End the pass."""


@final
class MergedPass(ServedPass):
    """Reads the passes of all workers as far ahead as these make steps, and acknowledges what the replicas have done.

    Args:
        links: One per worker.
        job: What they do together.
    """

    def __init__(self, links: Sequence[WorkerLink], job: MergedJob) -> None:
        starts: list[Position] = [link.call("position_of", 0) for link in links]
        step = 0 if job.state is None else int(job.state.get("step", 0))
        self._merged = MergedSteps([start.state for start in starts], job.num_replicas // len(links), step)
        super().__init__(job.num_replicas, self._merged.state, job.label)
        self._links = tuple(links)
        self._wait_s = job.timeouts.poll_s
        self._asked: list[Any] = [None] * len(links)
        self._told = [0] * len(links)  # places of each worker, that it knows to be done with
        self._pace_s: float | None = None
        self._stats: PipelineStats | None = None

    def _run(self) -> None:
        try:
            while not self._is_finished():
                if not self._offer_next():
                    self._read()
        except BaseException as error:  # a worker's pipeline is gone, or does not answer: nothing can follow
            self._fail(error, f"In {self._label}.")
        finally:
            for link in self._links:
                link.close()

    def _is_finished(self) -> bool:
        with self._changed:
            return self._queues.finished

    def _offer_next(self) -> bool:
        """Offer the next entry; False where a worker must be asked first."""
        with self._changed:
            entry = self._merged.next_entry()
            if entry is not None and not self._queues.closed:
                self._queues.offer(entry)
                self._changed.notify_all()
            return entry is not None

    def _read(self) -> None:
        """Wait until those workers have answered that hold the others up. All of them are asked."""
        for worker, link in enumerate(self._links):
            with self._changed:
                poll = self._poll_of(worker)
            if poll is not None:
                self._asked[worker] = link.ask(poll)
        with self._changed:
            self._acknowledged()  # news that came while a question was being sent
            missing = self._merged.missing()
        for worker in missing:
            entries = self._receive(worker)
            with self._changed:
                self._merged.add(worker, entries)

    def _poll_of(self, worker: int) -> Poll | None:
        """What to ask a worker; None if it was asked, or has no more."""
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
        self._asked[worker] = None  # only now: while it waits, it is told of what is done with
        if worker == 0 and entries and entries[-1].stats is not None:
            self._stats = entries[-1].stats
        return entries

    def _acknowledged(self) -> None:
        """Tell the workers whose poll waits: without news one that has no credit left would not go on."""
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
        """Of the first worker's pipeline."""
        if self._stats is None:
            stats: PipelineStats = self._links[0].call("stats")
            return stats
        return self._stats

    def close(self) -> None:
        super().close()
        for link in self._links:
            link.close()
