"""The default writer, the settings for steps, and the recording of `rd.summary` calls."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, final

from raydist.context.current import current, process_counter
from raydist.context.replica_context import ReplicaContext
from raydist.context.strategy import Strategy
from raydist.core.contextvar_scope import contextvar_scope
from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.summary.record import Record, SummaryData, step_number

RecordCondition = bool | Callable[[], Any]


class RecordSink(Protocol):
    """A receiver of records: the writer on the driver, the recorder of the step on a replica."""

    @property
    def weight(self) -> float | None:
        """The weight of this replica's values; None to ignore the values."""

    def take(self, record: Record) -> None:
        """Add a record."""


@final
@dataclass(frozen=True, slots=True)
class Destination:
    """The default writer.

    Attributes:
        writer: Key of the writer.
        sink: Receiver of the records.
        step: Step of calls without a step; None for the global step.
        here: The writer itself; None on a replica.
    """

    writer: str
    sink: RecordSink
    step: int | None = None
    here: Any = None


# Per thread and per task, like the context of a strategy.
_destination: ContextVar[Destination | None] = ContextVar("raydist_summary_destination", default=None)
_condition: ContextVar[RecordCondition] = ContextVar("raydist_summary_condition", default=True)
_step_sink: ContextVar[RecordSink | None] = ContextVar("raydist_summary_sink", default=None)
_on_pickled: ContextVar[Callable[[Any], None] | None] = ContextVar("raydist_summary_on_pickled", default=None)


def destination() -> Destination | None:
    """Return the default writer, or None."""
    return _destination.get()


def condition() -> bool:
    """Return True if summaries are to be recorded."""
    wanted = _condition.get()
    return bool(wanted() if callable(wanted) else wanted)


def step_sink() -> RecordSink | None:
    """Return the receiver of the records of the current step; None outside of a replica's step."""
    return _step_sink.get()


def as_destination(place: Destination | None) -> AbstractContextManager[None]:
    """Make `place` the default for the `with` block."""
    return contextvar_scope(_destination, place)


def pickling_a_step(on_writer: Callable[[Any], None]) -> AbstractContextManager[None]:
    """Allow pickling of writers as parts of a step in the `with` block, and pass each of them to `on_writer`."""
    return contextvar_scope(_on_pickled, on_writer)


def report_pickled(writer: Any) -> bool:
    """Pass a writer that is being pickled to `on_writer`; return False outside `pickling_a_step`."""
    on_writer = _on_pickled.get()
    if on_writer is not None:
        on_writer(writer)
    return on_writer is not None


@final
@dataclass(frozen=True, slots=True)
class SummaryOrder:
    """The state of `rd.summary` at a call of `strategy.run`.

    Attributes:
        writer: Key of the default writer; empty without one.
        step: Step of calls without a step; None for the global step.
        wanted: True if summaries are to be recorded.
    """

    writer: str = ""
    step: int | None = None
    wanted: bool = True


@final
class StepRecorder:
    """A recorder of the summaries of step functions on a replica, one run after another.

    `weight` returns the current weight of the replica's values: rows of the current batch, 1.0 without a batch, None on
    padding rows.
    """

    def __init__(self, weight: Callable[[], float | None]) -> None:
        self._weight = weight
        self._records: list[Record] = []

    @property
    def weight(self) -> float | None:
        return self._weight()

    def take(self, record: Record) -> None:
        self._records.append(record)

    def recording(self) -> AbstractContextManager[None]:
        """Install the recorder for one run."""
        return contextvar_scope(_step_sink, self)

    @contextlib.contextmanager
    def following(self, order: SummaryOrder) -> Iterator[None]:
        """Apply the driver's settings inside `recording`, for one run."""
        place = Destination(order.writer, self, order.step) if order.writer else None
        with as_destination(place), record_if(order.wanted):
            yield

    def take_records(self) -> tuple[Record, ...]:
        """Return the records since the last call, with tensors read. May block for a device."""
        if not self._records:
            return ()
        records, self._records = self._records, []
        return tuple(record.settled() for record in records)

    def drop_records(self) -> None:
        """Drop the records of a failed run."""
        self._records = []


def record(name: Any, step: Any, make: Callable[[float], SummaryData]) -> bool:
    """Record `make(weight)` with this replica's weight; return False without a writer or if `record_if` forbids it."""
    place = destination()
    if place is None or not condition():
        return False
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(f"The name of a summary must be a str, got {name!r:.80}. Pass e.g. 'loss'.")
    weight = place.sink.weight
    if weight is None:  # this replica works on padding rows
        return True
    data = make(weight)
    place.sink.take(Record(place.writer, name, step_at(step, place), data, time.time()))
    return True


def step_at(step: Any, place: Destination) -> int:
    """Return the step of a call with the argument `step`, which may be None."""
    found = place.step if step is None else step_number(step)
    return _global_step() if found is None else found


def _global_step() -> int:
    """Return the global step as a number; 0 in a step if the driver has not created the variable."""
    current_context = current()
    if isinstance(current_context, ReplicaContext):
        counter = current_context.strategy._find_counter()
    else:
        counter = current_context._make_counter() if isinstance(current_context, Strategy) else process_counter()
    return 0 if counter is None else int(counter.value)


def require_driver(what: str) -> None:
    """Raise FailedPreconditionError inside a step."""
    if isinstance(current(), ReplicaContext):
        raise FailedPreconditionError(
            f"{what} is for the driver: this code runs inside of strategy.run. Call it around the step."
        )


def record_if(condition: RecordCondition) -> AbstractContextManager[None]:
    """Record summaries in the `with` block only if a condition holds. The innermost condition applies.

    Around `strategy.run`, the driver evaluates the condition once for the step. Inside a step, each replica evaluates
    its own condition.

    Args:
        condition: A bool, or a function without arguments that is called at each call of `rd.summary`.

    Returns:
        A context manager.

    Source: tf.summary.record_if.

    >>> with rd.summary.record_if(False):
    ...     rd.summary.scalar("loss", 0.5, step=0)
    False
    """
    return contextvar_scope(_condition, condition)


def flush() -> None:
    """Flush the default writer: block until everything recorded so far is in its file. Do nothing without a writer.

    Blocks as `SummaryWriter.flush` does.

    Raises:
        Exception: An unreported error of a dispatched step.
        FailedPreconditionError: The file cannot be written, or the call is inside a step.

    Source: tf.summary.flush.

    >>> rd.summary.flush()  # there is no writer
    """
    place = destination()
    if place is not None:
        require_driver("rd.summary.flush")
        place.here.flush()
