"""What all functions of `rd.summary` have in common: whether something is recorded, where, and at which step."""

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
    """Record what `make` makes, given what this replica's values weigh. It is called only if it is wanted.

    Returns:
        Whether there is a writer that takes it.
    """
    place = destination()
    if place is None or not condition():
        return False
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(f"The name of a summary must be a str, got {name!r:.80}. Pass e.g. 'loss'.")
    share = place.taker.share
    if share is None:  # this replica works on others' rows
        return True
    shown = make(share)
    place.taker.take(Record(place.writer, name, step_at(step, place), shown, time.time()))
    return True


def step_at(step: Any, place: Destination) -> int:
    """The step of a call that names `step`, or none."""
    found = place.step if step is None else step_number(step)
    return global_step_here() if found is None else found


def require_driver(what: str) -> None:
    """FailedPreconditionError inside of a step."""
    if isinstance(current(), ReplicaContext):
        raise FailedPreconditionError(
            f"{what} is for the driver: this code runs inside of strategy.run. Call it around the step."
        )
