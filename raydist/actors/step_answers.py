"""Waiting for answers of the step channel, by the rules of `supervision`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError

from raydist.actors.step_channel import Answer, StepChannel
from raydist.actors.supervision import GRACE_S, late_error, missing, outcomes_of, root_cause
from raydist.errors import RaydistError

__all__ = ["ref_of", "wait_for_answers"]


def ref_of(known_by: Any) -> Any:
    """Ray's reference of what is known by it or by an answer; None where Ray has nothing of that."""
    return known_by.ref if isinstance(known_by, Answer) else known_by


def wait_for_answers(
    channel: StepChannel,
    answers: Sequence[Answer],
    names: Sequence[str],
    *,
    timeout_s: float,
    doing: str,
    limit: str,
    on_error: Callable[[], None],
) -> list[Any]:
    """The values of `answers`, one per actor of `names`. See `supervision.wait_for_all`, which this is like in all."""
    values: dict[int, Any] = {}
    try:
        _await_values(channel, answers, values, time.monotonic() + timeout_s)
    except Exception as error:
        timed_out = isinstance(error, GetTimeoutError)
    else:
        return [values[answer.rank] for answer in answers]
    on_error()
    channel.wait(answers, GRACE_S)
    known = {name: answer.ref for name, answer in zip(names, answers, strict=True) if answer.ref is not None}
    outcomes = outcomes_of(list(known.values()), list(known), doing)
    silent = [name for name, answer in zip(names, answers, strict=True) if not answer.settled]
    if timed_out and all(outcome is None or isinstance(outcome, RaydistError) for outcome in outcomes):
        raise late_error(silent or names, doing, timeout_s, limit)
    raise missing(root_cause([outcome for outcome in outcomes if outcome is not None]), silent)


def _await_values(channel: StepChannel, answers: Sequence[Answer], values: dict[int, Any], end: float) -> None:
    """Fill in what is there as soon as it is. An error of one replica comes before the others are done."""
    while len(values) < len(answers):
        if not channel.wait(answers, end - time.monotonic(), enough=len(values) + 1):
            raise GetTimeoutError
        for answer in answers:
            if answer.settled and answer.rank not in values:
                left_s = max(0.0, end - time.monotonic())
                values[answer.rank] = answer.value if answer.ref is None else ray.get(answer.ref, timeout=left_s)
