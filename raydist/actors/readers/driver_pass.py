"""One pass as the driver reads it: opened when it is first needed, lent to the replicas, taken back, ended."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, final

from raydist.actors.readers.step_reader import StepReader
from raydist.errors import FailedPreconditionError

if TYPE_CHECKING:
    from raydist.actors.passes.job import InputJob, MergedJob
    from raydist.actors.passes.link import PipelineLink
    from raydist.pipelines.elements.items import IteratorState

__all__ = ["DriverPass", "PassOpener"]


class PassOpener(Protocol):
    """Starts passes over datasets: `actors.passes.input_host.InputHost`."""

    def open(self, job: InputJob | MergedJob) -> PipelineLink:
        """Begin the pass that `job` describes."""


@final
class DriverPass:
    """A pass and the driver's reader of it. It ends with `end`, or when this is collected. Used under its owner's lock.

    Args:
        opener: Starts it.
        job: What it does.

    Attributes:
        lent: The replicas read it; the driver must take it back before it goes on.
        num_loans: How often it was lent to them.
        ended: They have read its end.
    """

    def __init__(self, opener: PassOpener, job: InputJob | MergedJob) -> None:
        self._opener = opener
        self._job = job
        self._link: PipelineLink | None = None
        self._reader: StepReader | None = None
        self._finalizer: weakref.finalize[[], DriverPass] | None = None
        self.lent = False
        self.num_loans = 0
        self.ended = False

    @property
    def is_open(self) -> bool:
        """Whether it has begun, and was not forgotten."""
        return self._link is not None

    @property
    def link(self) -> PipelineLink:
        """The way to it."""
        if self._link is None:
            raise FailedPreconditionError(f"raydist bug: {self._job.label} must have been opened, got no pass.")
        return self._link

    @property
    def reader(self) -> StepReader:
        """The driver's reader."""
        if self._reader is None:
            raise FailedPreconditionError(f"raydist bug: {self._job.label} is open and must have a reader, got none.")
        return self._reader

    def open(self, state: IteratorState | None) -> None:
        """Begin it at `state`, unless it has begun. Waits until its actor has it."""
        if self._link is None:
            self._link = self._opener.open(replace(self._job, state=state))
            self._finalizer = weakref.finalize(self, self._link.abandon)
            self._finalizer.atexit = False  # the actor dies with this process
            self._reader = self._reader_from(0)

    def _reader_from(self, start: int) -> StepReader:
        return StepReader(self.link, rank=None, start=start)

    def lend(self) -> None:
        """Leave the reading to the replicas, and give back what was read ahead."""
        if self._reader is not None:
            self._reader.give_back("lend")
        else:
            self.link.call("lend", 0)  # lent already: one more loop will follow the one under way
        self._reader = None
        self.lent = True
        self.num_loans += 1

    def take_back(self) -> IteratorState:
        """Go on where the replicas stopped; the state there. They must have stopped."""
        position = self.link.reclaim()
        self._reader = self._reader_from(position.number)
        self.lent = False
        self.ended = position.ended
        return position.state

    def end(self) -> None:
        """Stop it, once; pieces that it has made live on in the store. Any thread may call this."""
        if self._finalizer is not None and self._finalizer.detach() is not None:
            self.link.close()

    def release(self) -> None:
        """`end`, and read no more."""
        self._reader = None
        self.end()

    def forget(self) -> None:
        """`release`; what is opened next is another pass."""
        self.release()
        self._link, self.lent, self.ended = None, False, False
