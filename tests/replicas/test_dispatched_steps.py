"""Steps on actors that answer in this process; on a cluster they are run by `tests/strategies`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.core.fork_guard import OwningProcess
from raydist.replicas.dispatched_steps import DispatchedSteps
from tests.replicas.answering_actors import Actors, actors, planned, values

__all__ = ["actors"]


@pytest.fixture
def steps(actors: Actors) -> Any:
    found: Any = actors  # takes the place of `ReplicaActors`
    steps = DispatchedSteps(found, 10.0, OwningProcess("These steps"))
    yield steps
    steps.give_up()
    steps.close()


def learn(steps: DispatchedSteps) -> None:
    """Let it know that steps are short."""
    values(steps.dispatch(planned(0)))


@pytest.mark.parametrize("fails", [False, True])
def test_remarks_of_replicas_are_warnings_of_the_program(steps: DispatchedSteps, actors: Actors, fails: bool) -> None:
    actors.remarks = ("mind the gap",)
    actors.failing = (0, 1) if fails else None
    with (
        pytest.warns(UserWarning, match="mind the gap"),
        pytest.raises(ValueError, match="step 0") if fails else nullcontext(),
    ):
        values(steps.dispatch(planned(0)))


def test_who_reads_every_result_pays_one_message_a_replica_and_asks_nothing_else(
    steps: DispatchedSteps, actors: Actors
) -> None:
    actors.calls.clear()
    for step in range(5):
        assert values(steps.dispatch(planned(step))) == [step, step]
    assert actors.messages == [(rank, [step]) for step in range(5) for rank in range(2)]
    assert actors.calls == []


def test_who_runs_ahead_sends_groups(steps: DispatchedSteps, actors: Actors) -> None:
    learn(steps)
    actors.ready = False
    outcomes = [steps.dispatch(planned(step)) for step in range(1, 20)]
    steps.wait()
    assert [numbers for rank, numbers in actors.messages if rank == 1] == [[0], [1], [2], list(range(3, 19)), [19]]
    assert [values(outcome) for outcome in outcomes] == [[step, step] for step in range(1, 20)]


def test_the_window_is_bounded(steps: DispatchedSteps, actors: Actors) -> None:
    for step in range(100):
        steps.dispatch(planned(step))
        assert steps.num_under_way <= 48


def test_a_failure_that_nobody_read_is_told_once(steps: DispatchedSteps, actors: Actors) -> None:
    learn(steps)
    actors.ready = False
    actors.failing = (5, 0)
    outcomes = [steps.dispatch(planned(step)) for step in range(1, 12)]
    assert values(outcomes[3]) == [4, 4]  # of the same group as the one that fails
    with pytest.raises(ValueError, match="step 5"):
        steps.wait()
    steps.wait()


def test_a_value_where_run_returned_none_is_told_though_later_steps_ended_well(
    steps: DispatchedSteps, actors: Actors
) -> None:
    learn(steps)
    steps.dispatch(replace(planned(1), returns_none=True))
    steps.dispatch(planned(2))
    steps.until_now()()
    with pytest.raises(InvalidArgumentError, match="step 1 returned a value"):
        steps.wait()
    steps.wait()


def test_a_result_is_a_part_of_what_its_group_returns(steps: DispatchedSteps, actors: Actors) -> None:
    learn(steps)
    actors.ready = False
    outcomes = [steps.dispatch(planned(step)) for step in range(1, 6)]
    part = outcomes[4].part(1, 1, "('*', '*')")
    assert (part.place, part.leaf_index) == (2, 1)
    assert part.ref.leaf(0, part.place) == 5
