from __future__ import annotations

from typing import Any

import pytest

from raydist.actors.portable_errors import pack_error
from raydist.actors.step_answers import ref_of, wait_for_answers
from raydist.actors.step_channel import Answer, StepChannel
from raydist.actors.supervision import RemoteFailure
from raydist.errors import CancelledError, DeadlineExceededError

NAMES = ("replica 0", "replica 1")


class Channel:
    """Answers come when they are waited for, one more each time."""

    def __init__(self, coming: list[tuple[Answer, Any, Any]]) -> None:
        self._coming = coming

    def wait(self, answers: list[Answer], within_s: float, *, enough: int | None = None) -> bool:
        if self._coming:
            answer, value, ref = self._coming.pop(0)
            answer.settle(value, ref)
        return sum(answer.settled for answer in answers) >= (len(answers) if enough is None else enough)


def wait(coming: list[tuple[Answer, Any, Any]], answers: list[Answer], on_error: Any = lambda: None) -> list[Any]:
    channel: StepChannel = Channel(coming)  # type: ignore[assignment]  # takes its place
    return wait_for_answers(
        channel, answers, NAMES, timeout_s=3.0, doing="step 4", limit="Timeouts.step_s", on_error=on_error
    )


def two() -> list[Answer]:
    return [Answer(0, 1), Answer(1, 2)]


def test_values_are_in_the_order_of_replicas_whoever_is_first() -> None:
    first, second = answers = two()
    assert wait([(second, "b", None), (first, "a", None)], answers) == ["a", "b"]


def test_who_is_late_is_named() -> None:
    first, _ = answers = two()
    told: list[str] = []
    with pytest.raises(DeadlineExceededError, match=r"step 4 must end within 3 s, but replica 1 did not.*step_s"):
        wait([(first, "a", None)], answers, lambda: told.append("peers"))
    assert told == ["peers"]


def test_references_are_those_of_ray() -> None:
    answer = Answer(0, 1)
    assert ref_of(answer) is None
    answer.settle(ref="there")
    assert ref_of(answer) == "there"
    assert ref_of("a reference") == "a reference"


@pytest.mark.ray
def test_an_error_that_ray_has_is_raised_at_once_and_the_cause_of_others_wins(ray_cluster: None) -> None:
    import ray

    @ray.remote
    def fail(error: Exception) -> None:
        raise RemoteFailure(pack_error(error))

    first, second = answers = two()
    coming = [
        (second, None, fail.remote(CancelledError("given up"))),
        (first, None, fail.remote(ValueError("bad label"))),
    ]
    told: list[str] = []
    with pytest.raises(ValueError, match="bad label"):
        wait(coming, answers, lambda: told.append("peers"))
    assert told == ["peers"]


@pytest.mark.ray
def test_what_ray_has_is_a_value_like_any_other(ray_cluster: None) -> None:
    import ray

    first, second = answers = two()
    assert wait([(first, None, ray.put("large")), (second, "small", None)], answers) == ["large", "small"]
