"""The times at which steps are sent, against replicas that are a list of messages; nothing of Ray."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.core.errors import CancelledError
from raydist.core.fork_guard import OwningProcess
from raydist.core.values import Part, PerReplica
from raydist.mirroring.messages import StepPayload
from raydist.replicas.batching_policy import BatchingPolicy
from raydist.replicas.dispatched_steps import DispatchedSteps
from raydist.replicas.results import pack_result
from raydist.replicas.sent_group import Dispatched, SentGroup
from raydist.replicas.step import StepHeader
from raydist.replicas.step_message import GroupResult, PlannedStep, StepMessage


class Replicas:
    """One replica that takes messages; a group is done when the test says so."""

    names = ("replica 0",)

    def __init__(self) -> None:
        self.messages: list[list[int]] = []
        self.done: list[threading.Event] = []
        self.waits = 0
        self.arrived = threading.Event()  # of a third message

    def send(self, rank: int, message: StepMessage, objects: Sequence[Any]) -> threading.Event:
        self.messages.append([header.step for header in message.steps()])
        self.done.append(threading.Event())
        if len(self.messages) == 3:
            self.arrived.set()
        return self.done[-1]

    def are_ready(self, refs: Sequence[threading.Event], within_s: float) -> bool:
        self.waits += 1
        return refs[0].wait(within_s)

    def wait(self, refs: Sequence[threading.Event], names: Sequence[str], **limits: Any) -> list[GroupResult]:
        refs[0].set()
        result = pack_result(None, absent=False)
        return [GroupResult((result,) * len(self.messages[self.done.index(refs[0])]), 0.0)]

    def discard(self, refs: Sequence[Any]) -> None:
        """Nothing is logged."""


def steps_on(replicas: Replicas) -> DispatchedSteps:
    """Groups of 5, of functions whose key is "known"."""
    found: Any = replicas
    steps = DispatchedSteps(found, 10.0, OwningProcess("These steps"))
    steps._policy.learn(b"known", seconds=0.04, num_bytes=8)
    learn = steps._policy.learn
    steps._policy.learn = lambda key, **cost: learn(b"", **cost)  # type: ignore[method-assign]  # costs stay as they are
    return steps


def planned(step: int, *parts: PerReplica, key: bytes = b"known") -> PlannedStep:
    return PlannedStep(StepHeader(step, 0, StepPayload(digest=key)), parts)


@pytest.fixture
def replicas() -> Replicas:
    return Replicas()


@pytest.fixture
def steps(replicas: Replicas) -> Iterator[DispatchedSteps]:
    steps = steps_on(replicas)
    yield steps
    for event in replicas.done:
        event.set()
    steps.close()


def test_steps_go_alone_until_the_replicas_are_busy_and_then_in_groups(
    steps: DispatchedSteps, replicas: Replicas
) -> None:
    before = set(threading.enumerate())  # strategies of the session have some of this name
    for step in range(12):
        steps.dispatch(planned(step))
    assert replicas.messages == [[0], [1], [2, 3, 4, 5, 6], [7, 8, 9, 10, 11]]
    assert steps.num_under_way == 12
    (thread,) = set(threading.enumerate()) - before
    assert thread.name == "raydist-dispatch"
    for done in replicas.done:
        done.set()
    steps.close()
    assert not thread.is_alive()


def test_what_was_gathered_is_sent_when_a_group_is_done_though_nobody_waits(
    steps: DispatchedSteps, replicas: Replicas
) -> None:
    for step in range(4):
        steps.dispatch(planned(step))
    assert replicas.messages == [[0], [1]]
    replicas.done[0].set()
    assert replicas.arrived.wait(10)
    assert replicas.messages == [[0], [1], [2, 3]]


def test_a_function_that_is_not_known_is_not_kept_waiting_and_keeps_nobody_waiting(
    steps: DispatchedSteps, replicas: Replicas
) -> None:
    for step in range(4):
        steps.dispatch(planned(step))
    steps.dispatch(planned(4, key=b"new"))
    last = steps.dispatch(planned(5))
    assert replicas.messages == [[0], [1], [2, 3], [4]]
    last.part(0, 0, "*")
    assert replicas.messages[-1] == [5]


def test_a_result_is_sent_before_the_step_that_uses_it(steps: DispatchedSteps, replicas: Replicas) -> None:
    for step in range(2):
        steps.dispatch(planned(step))
    first = steps.dispatch(planned(2))

    class Result(PerReplica):
        def part_on(self, rank: int, *, padding: bool = False) -> Part:
            return first.part(rank, 0, "*")

    second = steps.dispatch(planned(3, Result(())))
    assert replicas.messages == [[0], [1], [2]]
    second.part(0, 0, "*")
    assert replicas.messages == [[0], [1], [2], [3]]


@given(st.lists(st.sampled_from(["add", "slow", "read", "finish", "done"]), max_size=60))
def test_every_step_is_sent_once_and_in_order(events: list[str]) -> None:
    replicas = Replicas()
    steps = steps_on(replicas)
    ended: list[int] = []
    steps.on_results.append(lambda results: ended.append(len(ended)))
    number = 0
    for event in events:
        if event in ("add", "slow"):
            last = steps.dispatch(planned(number, key=b"known" if event == "add" else b"slow"))
            number += 1
        elif event == "read" and number:
            last.part(0, 0, "*")
        elif event == "done" and replicas.done:
            replicas.done[0].set()
        elif event == "finish" and number:
            last.results()
            assert len(ended) == number
    steps.wait()
    steps.close()
    assert ended == list(range(number)) == [step for message in replicas.messages for step in message]
    assert all(len(message) <= 5 for message in replicas.messages)


def test_values_of_the_driver_leave_at_once_and_what_is_given_up_was_sent(
    steps: DispatchedSteps, replicas: Replicas
) -> None:
    for step in range(3):
        steps.dispatch(planned(step))
    steps.dispatch(planned(3, PerReplica([1])))
    assert replicas.messages == [[0], [1], [2, 3]]
    steps.dispatch(planned(4))
    steps.give_up()  # replicas must have what it brings
    assert replicas.messages == [[0], [1], [2, 3], [4]]
    assert steps.num_under_way == 0


def test_who_keeps_a_result_does_not_keep_what_the_step_was_given(steps: DispatchedSteps) -> None:
    class Batch(PerReplica):
        def part_on(self, rank: int, *, padding: bool = False) -> Part:
            return Part(ref="in the store")

    batch = Batch(())
    seen = weakref.ref(batch)
    gc.disable()  # whatever lies in a cycle stays in the object store until Python looks for cycles
    try:
        result = steps.dispatch(planned(0, batch))
        del batch
        assert result.results()[0].is_none
        assert seen() is None
    finally:
        gc.enable()


def group_of(count: int) -> SentGroup:
    return SentGroup([Dispatched(planned(step), None) for step in range(count)], [None, None])


def answer(*values: int) -> GroupResult:
    return GroupResult(tuple(pack_result(value, absent=False) for value in values), seconds=0.3)


def test_steps_before_the_one_that_failed_keep_their_results() -> None:
    group = group_of(4)
    group.fail(ValueError("mine"), [answer(1, 2), answer(4, 5, 6)])
    assert [result.leaf(0) for result in group.results_at(1)] == [2, 5]
    for _ in range(2):
        with pytest.raises(ValueError, match="mine"):
            group.results_at(2)
    with pytest.raises(CancelledError, match=r"Step 3 was given up, because step 2 failed \(ValueError: mine\)\."):
        group.results_at(3)


def test_groups_are_short_in_time_and_small_in_results() -> None:
    for seconds, num_bytes, size in (
        *((1e-6, 8, 16), (0.02, 8, 10), (0.045, 8, 4), (0.25, 8, 1)),
        *((1e-6, 20_000, 3), (1e-6, 10**9, 1)),
    ):
        policy = BatchingPolicy()
        policy.learn(b"f", seconds=seconds, num_bytes=num_bytes)
        assert policy.group_size([b"f", b"f"]) == size, (seconds, num_bytes)
    for seconds, steps in ((1e-6, 48), (0.1, 8), (0.2, 5), (0.25, 4), (0.4, 3), (60.0, 3)):
        policy = BatchingPolicy()
        policy.learn(b"f", seconds=seconds, num_bytes=8)
        assert policy.window([b"f"]) == steps, "what waits for long steps waits for few"
        assert policy.window([b"f", b"new"]) <= max(min(steps, 8), 3)
