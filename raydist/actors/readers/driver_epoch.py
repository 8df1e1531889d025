"""The driver's side of one epoch over a distributed dataset: it is opened, lent to the replicas, taken back, and ended.

Batches are references to objects that the input pipeline owns. If the pipeline is lost, batches that are still needed
are made again by another one.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, final

from raydist.actors.epochs.job import InputJob
from raydist.actors.readers.step_reader import StepReader
from raydist.core.errors import FailedPreconditionError, UnavailableError
from raydist.core.exception_utils import what_was_raised
from raydist.core.values import Part, PerReplica

if TYPE_CHECKING:
    from raydist.actors.epochs.batch_group import StepBatch
    from raydist.actors.epochs.job import MergedJob
    from raydist.actors.epochs.link import PipelineLink
    from raydist.pipelines.elements.items import IteratorState


class EpochOpener(Protocol):
    """The interface that starts epochs over datasets: `actors.epochs.input_pipeline_actors.InputPipelineActors`."""

    def open(self, job: InputJob | MergedJob) -> PipelineLink:
        """Start the epoch that `job` describes."""


@final
class DriverEpoch:
    """An epoch and the driver's reader. The epoch ends with `end`, or when this object is collected. Not thread-safe.

    Args:
        opener: Starts the epoch.
        job: Describes the epoch.
        recovers: See `EpochSource`.

    Attributes:
        lent: True while the replicas read the epoch; the driver must take it back before it reads on.
        num_loans: Number of times that the epoch was lent to the replicas.
        ended: True if the replicas have read the end.
        source: Makes the batches.
    """

    def __init__(self, opener: EpochOpener, job: InputJob | MergedJob, *, recovers: bool = False) -> None:
        self._opener = opener
        self._recovers = recovers
        self._job = job
        self._link: PipelineLink | None = None
        self._reader: StepReader | None = None
        self._finalizer: weakref.finalize[[], DriverEpoch] | None = None
        self.source = EpochSource(opener, job, recovers)
        self.lent = False
        self.num_loans = 0
        self.ended = False

    @property
    def is_open(self) -> bool:
        return self._link is not None

    @property
    def link(self) -> PipelineLink:
        if self._link is None:
            raise FailedPreconditionError(f"raydist bug: {self._job.label} must have been opened, got no epoch.")
        return self._link

    @property
    def reader(self) -> StepReader:
        if self._reader is None:
            raise FailedPreconditionError(f"raydist bug: {self._job.label} is open and must have a reader, got none.")
        return self._reader

    def open(self, state: IteratorState | None) -> None:
        """Start the epoch at `state`, unless it has started. Blocks until the actor has it."""
        if self._link is None:
            job = replace(self._job, state=state)
            self._link = self._opener.open(job)
            self.source = EpochSource(self._opener, job, self._recovers)
            self._finalizer = weakref.finalize(self, self._link.abandon)
            self._finalizer.atexit = False  # the actor dies with this process
            self._reader = self._reader_from(0)

    def _reader_from(self, start: int) -> StepReader:
        return StepReader(self.link, rank=None, start=start)

    def lend(self) -> None:
        """Lend the epoch to the replicas, and return the batches that the driver has read ahead."""
        if self._reader is not None:
            self._reader.give_back("lend")
        else:
            self.link.call("lend", 0)  # lent already: another loop follows the running one
        self._reader = None
        self.lent = True
        self.num_loans += 1

    def take_back(self) -> IteratorState:
        """Continue where the replicas stopped, and return the state there. The replicas must have stopped."""
        position = self.link.reclaim()
        self._reader = self._reader_from(position.number)
        self.lent = False
        self.ended = position.ended
        return position.state

    def end(self) -> None:
        """Stop the epoch, once; data that it has made stays in the object store. Any thread may call this."""
        if self._finalizer is not None and self._finalizer.detach() is not None:
            self.link.close()

    def release(self) -> None:
        """End the epoch and drop the reader."""
        self._reader = None
        self.end()

    def recut(self, job: InputJob) -> None:
        """Release the epoch; the next `open` starts the epoch of this job."""
        self.forget()
        self._job = job

    def forget(self) -> None:
        """Release the epoch; the next `open` starts another epoch."""
        self.release()
        self._link, self.lent, self.ended = None, False, False


@final
@dataclass(frozen=True, slots=True, eq=False)
class EpochStart:
    """The place at which replicas began to read an epoch.

    Attributes:
        link: Link to the epoch.
        state: State of the input pipeline there.
        iterator: The driver's iterator, while the program has it.
    """

    link: PipelineLink
    state: IteratorState
    iterator: weakref.ref[Any]

    def begin_again(self, num_loops: int) -> None:
        """Make the replicas begin here again, in loops that are sent again. They must not read meanwhile. Blocks.

        Raises:
            UnavailableError: The pipeline is gone, or the workers read separate parts.
        """
        job = self.link.job
        if not isinstance(job, InputJob):
            raise UnavailableError(
                f"Replicas must read batches of input pipeline {self.link.name} again, but its workers read separate "
                "parts, so they cannot."
            )
        self.link.call("begin_again", replace(job, state=self.state), num_loops, self.iterator() is None)


@final
@dataclass(frozen=True, slots=True, eq=False)
class EpochSource:
    """The opener and the job that make the batches of an epoch. Places are counted from the state of the job.

    With `recovers`, batches that are lost with their input pipeline are made again.
    """

    opener: EpochOpener
    job: InputJob | MergedJob
    recovers: bool


@final
class DrawnBatch:
    """A batch that the driver has drawn. It moves when it is made again.

    Attributes:
        source: Makes the batch again.
        number: Number of the batch's place in the source.
        before: State of the input pipeline before the batch; None for the beginning.
        batch: References to the pieces.
        link: Link to the epoch that made the pieces.
    """

    def __init__(
        self, source: EpochSource, number: int, before: IteratorState | None, batch: StepBatch, link: PipelineLink
    ) -> None:
        self.source = source
        self.number = number
        self.before = before
        self.batch = batch
        self.link = link

    def move_to(self, batch: StepBatch | None, link: PipelineLink) -> None:
        """Replace the pieces by others with the same rows."""
        if batch is None or sum(batch.rows) != sum(self.batch.rows):
            raise UnavailableError(
                f"Batch {self.number} of {self.source.job.label} was lost with its input pipeline. The pipeline that "
                "took its place must make the same batch, but has made another one: have the files changed, or is the "
                "dataset not deterministic?"
            )
        self.batch, self.link = batch, link


def recut(batches: Collection[DrawnBatch], num_replicas: int) -> None:
    """Make batches again that were cut for another number of replicas. Blocks and raises as `make_again` does."""
    found: list[DrawnBatch] = []
    sources: dict[EpochSource, EpochSource] = {}
    for each in batches:
        source, job = each.source, each.source.job
        if len(each.batch.group.refs) != num_replicas and isinstance(job, InputJob) and job.can_be_recut:
            recut_job = job.recut(num_replicas, 2 if job.serves_workers else 1)
            each.source = sources.setdefault(source, replace(source, job=recut_job))
            found.append(each)
    make_again(found)


def make_again(batches: Collection[DrawnBatch]) -> None:
    """Make batches again whose input pipeline is gone. Blocks while another pipeline starts and makes them.

    Raises:
        UnavailableError: The other pipeline makes other batches.
        DeadlineExceededError: It does not start, or make them, within the limits of `Timeouts`.
    """
    wanted: dict[EpochSource, dict[int, DrawnBatch]] = {}
    for each in batches:
        wanted.setdefault(each.source, {})[each.number] = each
    for source, by_number in wanted.items():
        first, last = min(by_number), max(by_number)
        link = source.opener.open(replace(source.job, state=by_number[first].before))
        try:
            reader = StepReader(link, rank=None, start=0)
            for number in range(first, last + 1):
                place = reader.next_place()
                if number in by_number:
                    if place.entry.error is not None:
                        raise what_was_raised(place.entry.error.restore())
                    by_number[number].move_to(place.batch, link)
        finally:
            link.close()  # the batches stay


@final
class BatchLeaf(PerReplica):
    """One leaf of a distributed batch. The parts are in the object store, and replicas map them from there."""

    def __init__(self, drawn: DrawnBatch, index: int) -> None:
        super().__init__(())
        self._values = None
        self.drawn = drawn
        self.index = index

    @property
    def rows(self) -> tuple[int, ...]:
        return self.drawn.batch.rows

    @property
    def num_parts(self) -> int:
        return len(self.drawn.batch.group.refs)

    def part_on(self, rank: int, *, padding: bool = False) -> Part:
        batch = self.drawn.batch
        place = batch.place_on(rank, padding=padding)
        return Part(ref=batch.group.refs[rank], leaf_index=self.index, place=place, on_host=self.drawn.link.on_host)

    def _fetch(self) -> tuple[Any, ...]:
        try:
            return self._values_of_parts()
        except UnavailableError:
            if not self.drawn.source.recovers or not self.drawn.link.is_lost():
                raise
        make_again([self.drawn])
        return self._values_of_parts()

    def _values_of_parts(self) -> tuple[Any, ...]:
        batch = self.drawn.batch
        places = [batch.place_on(rank, padding=False) for rank in range(self.num_parts)]
        pieces = map(self.drawn.link.fetch, batch.group.refs)
        return tuple(piece.leaf(self.index, place) for piece, place in zip(pieces, places, strict=True))
