"""When the state of the replicas is copied, and to which copy they go back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from raydist.core.errors import UnavailableError
from raydist.replicas import state_copies
from raydist.replicas.state_copies import StateCopies


class Steps:
    """Dispatched steps, of which all since `keep_from` can run again."""

    def __init__(self) -> None:
        self.last, self.num_replicas = -1, 2
        self.keep_from: int | None = None

    def send_all(self) -> None: ...

    def can_go_back_to(self, step: int) -> bool:
        return self.keep_from is not None and step >= self.keep_from


class Actors:
    """Replicas that answer when `answers` is set: with the seconds that a copy took, None, or an error."""

    names = ("replica 0", "replica 1")

    def __init__(self) -> None:
        self.answers: Any = None
        self.asked: list[str] = []

    def call(self, rank: int, method: str) -> tuple[str, int]:
        self.asked.append(method)
        return method, rank

    def are_ready(self, refs: Sequence[Any], within_s: float) -> bool:
        return self.answers is not None

    def wait(self, refs: Sequence[Any], names: Sequence[str], **limits: Any) -> list[float | None]:
        if isinstance(self.answers, Exception):
            raise self.answers
        found: list[float | None] = self.answers
        return found


def copies_of(steps: Any, actors: Any, *, always: bool = True) -> StateCopies:
    return StateCopies(steps, actors, 1.0, always=always)


def run(copies: StateCopies, steps: Steps, number: int) -> None:
    for _ in range(number):
        copies.before_step([])
        steps.last += 1


def step_of(copies: StateCopies) -> int | None:
    point = copies.point()
    return None if point is None else point.step


def test_copies_are_made_after_a_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_copies, "_MOST_STEPS", 5)
    steps, actors = Steps(), Actors()
    copies = copies_of(steps, actors)
    run(copies, steps, 5)
    assert (step_of(copies), actors.asked) == (0, [])  # nothing to copy before the first step
    run(copies, steps, 3)
    assert step_of(copies) == 0  # that of step 5 is not there yet
    assert actors.asked == ["copy_state"] * 2 + ["copy_seconds"] * 2
    actors.answers = [0.1, 0.2]
    run(copies, steps, 1)
    assert (step_of(copies), steps.keep_from) == (5, 5)


def test_a_copy_that_a_replica_could_not_make_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_copies, "_MOST_STEPS", 3)
    steps, actors = Steps(), Actors()
    copies = copies_of(steps, actors)
    for answers in ([0.1, None], UnavailableError("It died.", actor="replica 1")):
        actors.answers = answers
        run(copies, steps, 4)
        assert step_of(copies) == 0
    actors.answers = [0.1, 0.1]
    run(copies, steps, 2)
    assert step_of(copies) == 8
    actors.answers = TypeError("cannot pickle")
    with pytest.raises(TypeError, match="cannot pickle"):
        run(copies, steps, 9)


def test_after_a_failed_step_a_new_copy_is_made_at_once() -> None:
    steps, actors = Steps(), Actors()
    copies = copies_of(steps, actors)
    actors.answers = [0.1, 0.1]
    run(copies, steps, 2)
    steps.keep_from = None  # the driver has given up its steps
    assert step_of(copies) is None
    run(copies, steps, 1)
    assert step_of(copies) == 2
    copies.forget()
    assert step_of(copies) is None


def test_without_need_nothing_is_copied() -> None:
    steps, actors = Steps(), Actors()
    copies = copies_of(steps, actors, always=False)
    run(copies, steps, 1000)
    assert (step_of(copies), actors.asked) == (None, [])
