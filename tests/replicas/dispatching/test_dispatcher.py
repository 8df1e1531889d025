"""The dispatcher against replicas that are a list of messages; nothing of Ray."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.errors import CancelledError
from raydist.mirroring.shipment import Shipment
from raydist.replicas.dispatching.dispatcher import Dispatcher, SentGroup
from raydist.replicas.dispatching.pace import Pace
from raydist.replicas.results import pack_result
from raydist.replicas.step import StepHeader
from raydist.replicas.step_message import GroupResult, PlannedStep
from raydist.values import Part, PerReplica


class Replicas:
    """Takes messages; a group is done when the test says so."""

    def __init__(self) -> None:
        self.messages: list[list[int]] = []
        self.done: list[threading.Event] = []
        self.waits = 0

    def send(self, steps: Sequence[PlannedStep]) -> list[Any]:
        self.messages.append([step.header.step for step in steps])
        self.done.append(threading.Event())
        return [self.done[-1], self.done[-1]]

    def await_done(self, ref: threading.Event, within_s: float) -> bool:
        self.waits += 1
        return ref.wait(within_s)


def planned(step: int, *parts: PerReplica, key: bytes = b"known") -> PlannedStep:
    return PlannedStep(StepHeader(step, 0, Shipment(digest=key)), parts)


@pytest.fixture
def replicas() -> Replicas:
    return Replicas()


@pytest.fixture
def dispatcher(replicas: Replicas) -> Iterator[Dispatcher]:
    pace = Pace()
    pace.learn(b"known", seconds=0.04, num_bytes=8)  # groups of 5
    dispatcher = Dispatcher(replicas.send, replicas.await_done, pace)
    yield dispatcher
    for event in replicas.done:
        event.set()
    dispatcher.close()


def test_steps_go_alone_until_the_replicas_are_busy_and_then_in_groups(
    dispatcher: Dispatcher, replicas: Replicas
) -> None:
    for step in range(12):
        dispatcher.add(planned(step))
    assert replicas.messages == [[0], [1], [2, 3, 4, 5, 6], [7, 8, 9, 10, 11]]
    assert dispatcher.num_steps == 12


def lingering(replicas: Replicas) -> Dispatcher:
    """Of eight replicas whose steps take so long that six travel together."""
    pace = Pace(6)
    pace.learn(b"known", seconds=0.2, num_bytes=8)
    return Dispatcher(replicas.send, replicas.await_done, pace)


def test_long_steps_wait_for_each_other_though_replicas_could_begin(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pace, "linger_s", lambda *_: 60.0)  # however slow this machine is, the group is full before
    dispatcher = lingering(replicas)
    for step in range(13):
        dispatcher.add(planned(step))
    assert replicas.messages == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    dispatcher.flush()  # who asks for a result does not linger
    assert replicas.messages[-1] == [12]
    for done in replicas.done:
        done.set()
    dispatcher.close()


def test_a_long_step_without_company_is_sent_though_nobody_waits(replicas: Replicas) -> None:
    dispatcher = lingering(replicas)
    arrived = threading.Event()
    send = replicas.send

    def send_and_tell(steps: Sequence[PlannedStep]) -> list[Any]:
        refs = send(steps)
        arrived.set()
        return refs

    dispatcher._send = send_and_tell  # the constructor took the plain one
    dispatcher.add(planned(0))
    assert arrived.wait(10)
    assert replicas.messages == [[0]]
    assert replicas.waits == 0
    dispatcher.close()


def test_what_was_gathered_is_sent_when_a_group_is_done_though_nobody_waits(
    dispatcher: Dispatcher, replicas: Replicas
) -> None:
    arrived = threading.Event()
    send = replicas.send

    def send_and_tell(steps: Sequence[PlannedStep]) -> list[Any]:
        refs = send(steps)
        if len(replicas.messages) == 3:
            arrived.set()
        return refs

    dispatcher._send = send_and_tell  # the fixture's dispatcher took the plain one
    for step in range(4):
        dispatcher.add(planned(step))
    assert replicas.messages == [[0], [1]]
    replicas.done[0].set()
    assert arrived.wait(10)
    assert replicas.messages == [[0], [1], [2, 3]]


def test_no_thread_looks_while_nothing_is_gathered(dispatcher: Dispatcher, replicas: Replicas) -> None:
    before = threading.active_count()
    dispatcher.add(planned(0))
    dispatcher.add(planned(1))
    assert threading.active_count() == before
    assert replicas.waits == 0


def test_a_function_that_is_not_known_is_not_kept_waiting_and_keeps_nobody_waiting(
    dispatcher: Dispatcher, replicas: Replicas
) -> None:
    for step in range(4):
        dispatcher.add(planned(step))
    dispatcher.add(planned(4, key=b"new"))
    dispatcher.add(planned(5))
    assert replicas.messages == [[0], [1], [2, 3], [4]]
    dispatcher.flush()
    assert replicas.messages[-1] == [5]


def test_values_of_the_driver_leave_at_once(dispatcher: Dispatcher, replicas: Replicas) -> None:
    for step in range(3):
        dispatcher.add(planned(step))
    dispatcher.add(planned(3, PerReplica([1, 2])))
    assert replicas.messages == [[0], [1], [2, 3]]


def test_a_result_is_sent_before_the_step_that_uses_it(dispatcher: Dispatcher, replicas: Replicas) -> None:
    for step in range(2):
        dispatcher.add(planned(step))
    first = dispatcher.add(planned(2))

    class Result(PerReplica):
        def part_on(self, rank: int, *, stand_in: bool = False) -> Part:
            dispatcher.flush()
            assert first.group is not None
            return Part(ref=first.group.refs[rank], place=first.place)

    dispatcher.add(planned(3, Result(())))
    dispatcher.flush()
    assert replicas.messages == [[0], [1], [2], [3]]


@given(st.lists(st.sampled_from(["add", "slow", "flush", "finish", "done"]), max_size=60))
def test_every_step_is_sent_once_and_in_order(events: list[str]) -> None:
    replicas, pace = Replicas(), Pace()
    pace.learn(b"known", seconds=0.04, num_bytes=8)
    dispatcher = Dispatcher(replicas.send, replicas.await_done, pace)
    number = 0
    finished: list[int] = []
    for event in events:
        if event in ("add", "slow"):
            dispatcher.add(planned(number, key=b"known" if event == "add" else b"slow"))
            number += 1
        elif event == "flush":
            dispatcher.flush()
        elif event == "done" and replicas.done:
            replicas.done[0].set()
        elif event == "finish" and (group := dispatcher.oldest()) is not None:
            group.refs[0].set()
            finished += range(group.first_step, group.first_step + group.num_steps)
            dispatcher.finished(group)
    while (group := dispatcher.oldest()) is not None:
        finished += range(group.first_step, group.first_step + group.num_steps)
        dispatcher.finished(group)
    for done in replicas.done:
        done.set()
    dispatcher.close()
    assert finished == list(range(number)) == [step for message in replicas.messages for step in message]
    assert all(len(message) <= 5 for message in replicas.messages)


def test_what_is_given_up_was_sent_since_replicas_must_have_what_it_brings(
    dispatcher: Dispatcher, replicas: Replicas
) -> None:
    for step in range(4):
        dispatcher.add(planned(step))
    assert [group.first_step for group in dispatcher.give_up()] == [0, 1, 2]
    assert replicas.messages[-1] == [2, 3]
    assert dispatcher.num_steps == 0


def test_who_keeps_a_result_does_not_keep_what_the_step_was_given(dispatcher: Dispatcher, replicas: Replicas) -> None:
    class Batch(PerReplica):
        def part_on(self, rank: int, *, stand_in: bool = False) -> Part:
            return Part(ref="in the store")

    batch = Batch(())
    seen = weakref.ref(batch)
    gc.disable()  # whatever lies in a cycle stays in the object store until Python looks for cycles
    try:
        result = dispatcher.add(planned(0, batch))
        del batch
        group = dispatcher.oldest()
        assert group is not None
        dispatcher.finished(group)
        assert (result.group, seen()) == (group, None)
    finally:
        gc.enable()


def test_the_thread_ends_with_the_dispatcher(dispatcher: Dispatcher, replicas: Replicas) -> None:
    before = set(threading.enumerate())  # strategies of the session have some of this name
    for step in range(3):
        dispatcher.add(planned(step))
    (thread,) = set(threading.enumerate()) - before
    assert thread.name == "raydist-dispatch"
    for done in replicas.done:
        done.set()
    dispatcher.close()
    assert not thread.is_alive()


def group_of(count: int) -> SentGroup:
    return SentGroup(0, [b"known"] * count, [None, None])


def answer(*values: int) -> GroupResult:
    return GroupResult(tuple(pack_result(value, absent=False) for value in values), seconds=0.3)


def test_results_come_by_place() -> None:
    group = group_of(3)
    assert (group.title, group.finished) == ("steps 0 to 2", False)
    group.succeed([answer(1, 2, 3), answer(4, 5, 6)])
    assert [result.leaf(0) for result in group.results_at(1)] == [2, 5]
    assert group.seconds_a_step == pytest.approx(0.1)


def test_steps_before_the_one_that_failed_keep_their_results() -> None:
    group = group_of(4)
    group.fail(ValueError("mine"), [answer(1, 2), answer(4, 5, 6)])
    assert [result.leaf(0) for result in group.results_at(1)] == [2, 5]
    for _ in range(2):
        with pytest.raises(ValueError, match="mine"):
            group.results_at(2)
    with pytest.raises(CancelledError, match=r"Step 3 was given up, because step 2 failed \(ValueError: mine\)\."):
        group.results_at(3)


def test_a_replica_that_died_takes_the_group_with_it() -> None:
    group = group_of(2)
    group.fail(RuntimeError("gone"), [answer(1, 2), GroupResult(())])
    with pytest.raises(RuntimeError, match="gone"):
        group.results_at(0)
