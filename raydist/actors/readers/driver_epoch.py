"""The driver's side of one epoch: opened on first use, lent to the replicas, taken back, and ended."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, final

from raydist.actors.readers.step_reader import StepReader
from raydist.core.errors import FailedPreconditionError

if TYPE_CHECKING:
    from raydist.actors.epochs.job import InputJob, MergedJob
    from raydist.actors.epochs.link import PipelineLink
    from raydist.pipelines.elements.items import IteratorState


class EpochOpener(Protocol):
    """The interface that starts epochs over datasets: `actors.epochs.input_host.InputHost`."""

    def open(self, job: InputJob | MergedJob) -> PipelineLink:
        """Start the epoch that `job` describes."""


@final
class DriverEpoch:
    """An epoch and the driver's reader. The epoch ends with `end`, or when this object is collected. Not thread-safe.

    Args:
        opener: Starts the epoch.
        job: Describes the epoch.

    Attributes:
        lent: True while the replicas read the epoch; the driver must take it back before it reads on.
        num_loans: Number of times that the epoch was lent to the replicas.
        ended: True if the replicas have read the end.
    """

    def __init__(self, opener: EpochOpener, job: InputJob | MergedJob) -> None:
        self._opener = opener
        self._job = job
        self._link: PipelineLink | None = None
        self._reader: StepReader | None = None
        self._finalizer: weakref.finalize[[], DriverEpoch] | None = None
        self.lent = False
        self.num_loans = 0
        self.ended = False

    @property
    def is_open(self) -> bool:
        """Return True if the epoch was started, and not forgotten since."""
        return self._link is not None

    @property
    def link(self) -> PipelineLink:
        """The link to the epoch."""
        if self._link is None:
            raise FailedPreconditionError(f"raydist bug: {self._job.label} must have been opened, got no epoch.")
        return self._link

    @property
    def reader(self) -> StepReader:
        """The driver's reader of the epoch."""
        if self._reader is None:
            raise FailedPreconditionError(f"raydist bug: {self._job.label} is open and must have a reader, got none.")
        return self._reader

    def open(self, state: IteratorState | None) -> None:
        """Start the epoch at `state`, unless it has started. Blocks until the actor has it."""
        if self._link is None:
            self._link = self._opener.open(replace(self._job, state=state))
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

    def forget(self) -> None:
        """Release the epoch; the next `open` starts another epoch."""
        self.release()
        self._link, self.lent, self.ended = None, False, False
