"""Where calls of `rd.summary` go to: which writer is the default here, and what takes their records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, final

from raydist.set_inside import SetInside
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
    """What records are given to: on the driver a writer, on a replica the recorder of the step."""

    @property
    def share(self) -> float | None:
        """What this replica's values weigh; None where they do not count."""

    def take(self, record: Record) -> None:
        """Add a record."""


@final
@dataclass(frozen=True, slots=True)
class Destination:
    """The default writer.

    Attributes:
        writer: Its key.
        taker: What takes its records.
        step: The step of calls that name none; None for the global step.
        here: The writer itself; None on a replica.
    """

    writer: str
    taker: RecordTaker
    step: int | None = None
    here: Any = None


# Per thread and per task, as the context of a strategy.
_destination: ContextVar[Destination | None] = ContextVar("raydist_summary_destination", default=None)
_condition: ContextVar[RecordCondition] = ContextVar("raydist_summary_condition", default=True)
_taker: ContextVar[RecordTaker | None] = ContextVar("raydist_summary_taker", default=None)
_noting: ContextVar[Callable[[Any], None] | None] = ContextVar("raydist_summary_noting", default=None)


def destination() -> Destination | None:
    """The default writer; None without one."""
    return _destination.get()


def condition() -> bool:
    """Whether anything is to be recorded."""
    wanted = _condition.get()
    return bool(wanted() if callable(wanted) else wanted)


def taker() -> RecordTaker | None:
    """What takes the records of the step that runs here; None outside of a replica's step."""
    return _taker.get()


def as_destination(place: Destination | None) -> AbstractContextManager[None]:
    """Make it the default inside."""
    return SetInside(_destination, place)


@contextmanager
def only_if(wanted: RecordCondition) -> Iterator[None]:
    """Inside nothing is recorded but where this holds. Programs may decorate functions with it."""
    with SetInside(_condition, wanted):
        yield


def as_taker(found: RecordTaker) -> SetInside:
    """A replica's step runs inside."""
    return SetInside(_taker, found)


def noting(take: Callable[[Any], None]) -> AbstractContextManager[None]:
    """A step is pickled inside: the writers that it uses are given to `take`."""
    return SetInside(_noting, take)


def note(writer: Any) -> bool:
    """A writer is pickled here; whether that is for a step."""
    take = _noting.get()
    if take is not None:
        take(writer)
    return take is not None
