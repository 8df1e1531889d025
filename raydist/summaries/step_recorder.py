"""The recorder of a step's summaries on a replica."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import final

from raydist.summaries.destination import Destination, as_destination, as_taker, only_if
from raydist.summaries.order import SummaryOrder
from raydist.summaries.record import Record

__all__ = ["StepRecorder"]


@final
class StepRecorder:
    """The records of step functions on a replica, one run after another.

    Args:
        share: Returns the current weight of the replica's values: rows of the current batch, 1.0 without a batch, None
            on padding rows.
    """

    def __init__(self, share: Callable[[], float | None]) -> None:
        self._share = share
        self._records: list[Record] = []

    @property
    def share(self) -> float | None:
        return self._share()

    def take(self, record: Record) -> None:
        self._records.append(record)

    def recording(self) -> AbstractContextManager[None]:
        """Install the recorder for one run."""
        return as_taker(self)

    @contextmanager
    def following(self, order: SummaryOrder) -> Iterator[None]:
        """Apply the driver's settings inside `recording`, for one run."""
        place = Destination(order.writer, self, order.step) if order.writer else None
        with as_destination(place), only_if(order.wanted):
            yield

    def take_records(self) -> tuple[Record, ...]:
        """Return the settled records since the last call."""
        if not self._records:
            return ()
        records, self._records = self._records, []
        return tuple(record.settled() for record in records)

    def drop_records(self) -> None:
        """Drop the records of a failed run."""
        self._records = []
