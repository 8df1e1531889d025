"""What a step shows on one replica, until it travels with the step's result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from raydist.set_inside import SetInside
from raydist.summaries.destination import Destination, as_destination, as_taker, only_if
from raydist.summaries.order import SummaryOrder
from raydist.summaries.record import Record

__all__ = ["StepRecorder"]


@final
class StepRecorder:
    """Takes the records of a step function on a replica, one run after another.

    Args:
        share: Tells what the replica's values weigh now: rows of the batch at hand, 1.0 without one, None where its
            rows are others'.
    """

    def __init__(self, share: Callable[[], float | None]) -> None:
        self._share = share
        self._records: list[Record] = []

    @property
    def share(self) -> float | None:
        return self._share()

    def take(self, record: Record) -> None:
        self._records.append(record)

    def recording(self) -> SetInside:
        """Around each run."""
        return as_taker(self)

    @contextmanager
    def following(self, order: SummaryOrder) -> Iterator[None]:
        """In there, around a run for which the driver has said something."""
        place = Destination(order.writer, self, order.step) if order.writer else None
        with as_destination(place), only_if(order.wanted):
            yield

    def take_records(self) -> tuple[Record, ...]:
        """What was recorded since this was asked last, fit to travel."""
        if not self._records:
            return ()
        records, self._records = self._records, []
        return tuple(record.settled() for record in records)

    def drop_records(self) -> None:
        """The run has failed: nobody is to see them."""
        self._records = []
