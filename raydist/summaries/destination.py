"""The destination of `rd.summary` calls: the default writer, and the object that takes its records."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, final

from raydist.set_inside import set_inside
from raydist.summaries.record import Record

__all__ = [
    "RecordCondition",
    "Destination",
    "RecordTaker",
    "as_destination",
    "as_taker",
    "condition",
    "destination",
    "note",
    "noting",
    "only_if",
    "taker",
]

RecordCondition = bool | Callable[[], Any]


class RecordTaker(Protocol):
    """A receiver of records: a writer on the driver, the recorder of the step on a replica."""

    @property
    def share(self) -> float | None:
        """The weight of this replica's values; None if they do not count."""

    def take(self, record: Record) -> None:
        """Add a record."""


@final
@dataclass(frozen=True, slots=True)
class Destination:
    """The default writer.

    Attributes:
        writer: Key of the writer.
        taker: Object that takes the records.
        step: Step of calls without a step; None for the global step.
        here: The writer itself; None on a replica.
    """

    writer: str
    taker: RecordTaker
    step: int | None = None
    here: Any = None


# Per thread and per task, like the context of a strategy.
_destination: ContextVar[Destination | None] = ContextVar("raydist_summary_destination", default=None)
_condition: ContextVar[RecordCondition] = ContextVar("raydist_summary_condition", default=True)
_taker: ContextVar[RecordTaker | None] = ContextVar("raydist_summary_taker", default=None)
_noting: ContextVar[Callable[[Any], None] | None] = ContextVar("raydist_summary_noting", default=None)


def destination() -> Destination | None:
    """Return the default writer, or None."""
    return _destination.get()


def condition() -> bool:
    """Return True if summaries are to be recorded."""
    wanted = _condition.get()
    return bool(wanted() if callable(wanted) else wanted)


def taker() -> RecordTaker | None:
    """Return the object that takes records of the current step; None outside of a replica's step."""
    return _taker.get()


def as_destination(place: Destination | None) -> AbstractContextManager[None]:
    """Make `place` the default for the `with` block."""
    return set_inside(_destination, place)


def only_if(wanted: RecordCondition) -> AbstractContextManager[None]:
    """Record only while `wanted` is or returns True, for the `with` block. Also a decorator."""
    return set_inside(_condition, wanted)


def as_taker(found: RecordTaker) -> AbstractContextManager[None]:
    """Install the taker of a replica's step for the `with` block."""
    return set_inside(_taker, found)


def noting(take: Callable[[Any], None]) -> AbstractContextManager[None]:
    """Call `take` with each writer that is pickled with a step inside the `with` block."""
    return set_inside(_noting, take)


def note(writer: Any) -> bool:
    """Report a writer that is being pickled; return True if the pickle is for a step."""
    take = _noting.get()
    if take is not None:
        take(writer)
    return take is not None
