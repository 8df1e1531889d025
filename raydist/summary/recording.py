"""The common part of all functions of `rd.summary`: condition, writer and step of a record."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from raydist.context.current import current
from raydist.context.replica_context import ReplicaContext
from raydist.errors import FailedPreconditionError, InvalidArgumentError
from raydist.strategies.global_step import global_step_here
from raydist.summaries.destination import Destination, condition, destination
from raydist.summaries.record import Record, Shown
from raydist.summaries.step_number import step_number

__all__ = ["record", "require_driver", "step_at"]


def record(name: Any, step: Any, make: Callable[[float], Shown]) -> bool:
    """Record the result of `make`, called with the weight of this replica's values, and only if it is wanted.

    Returns:
        True if there is a writer that takes the record.
    """
    place = destination()
    if place is None or not condition():
        return False
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(f"The name of a summary must be a str, got {name!r:.80}. Pass e.g. 'loss'.")
    share = place.taker.share
    if share is None:  # this replica works on padding rows
        return True
    shown = make(share)
    place.taker.take(Record(place.writer, name, step_at(step, place), shown, time.time()))
    return True


def step_at(step: Any, place: Destination) -> int:
    """Return the step of a call with the argument `step`, which may be None."""
    found = place.step if step is None else step_number(step)
    return global_step_here() if found is None else found


def require_driver(what: str) -> None:
    """Raise FailedPreconditionError inside a step."""
    if isinstance(current(), ReplicaContext):
        raise FailedPreconditionError(
            f"{what} is for the driver: this code runs inside of strategy.run. Call it around the step."
        )
