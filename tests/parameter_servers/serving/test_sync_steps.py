from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import raydist as rd
from raydist.parameter_servers.requests import (
    Arrive,
    BeginClosure,
    DropArrival,
    EndClosure,
    FenceWorker,
    Finish,
    Pull,
    Push,
    PushKey,
    Sender,
    ServerAnswer,
    ServerRequest,
    Statistics,
)
from raydist.parameter_servers.server import ParameterServer
from raydist.parameter_servers.serving.changes import DelayedAnswer
from raydist.parameter_servers.serving.sync_steps import Accepted, Quorum, SyncSteps
from tests.parameter_servers.examples import OPTIMIZER, BareWorker, answer, ask, servers

NUMBERS = st.integers(0, 3)


class StepsWithBackups(RuleBasedStateMachine):
    """Workers that hold closures, arrive, end and die in any order."""

    @initialize(backups=st.integers(0, 3))
    def start(self, backups: int) -> None:
        self.backups = backups
        self.quorum = Quorum(backups)
        self.holding: set[int] = set()
        self.waiting: set[int] = set()
        self.steps: dict[int, set[int]] = {}
        self.last: dict[int, int] = {}

    @rule(worker=NUMBERS)
    def begin(self, worker: int) -> None:
        if worker not in self.waiting:
            self.quorum.begin(worker)
            self.holding.add(worker)

    @rule(worker=NUMBERS, behind=st.integers(0, 2))
    def arrive(self, worker: int, behind: int) -> None:
        if worker not in self.holding or worker in self.waiting:
            return
        step = max(0, self.quorum.step - behind)
        late = step < self.quorum.step and self.last.get(worker) != step
        told = self.quorum.arrive(worker, step)
        assert (told == "late") == late
        if told == "waiting" or (told == "accepted" and step not in self.steps):
            self.waiting.add(worker)
        self.look()

    @rule(worker=NUMBERS)
    def end(self, worker: int) -> None:
        if worker not in self.waiting:
            self.quorum.end(worker)
            self.holding.discard(worker)
            self.look()

    @rule(worker=NUMBERS)
    def die(self, worker: int) -> None:
        self.quorum.forget(worker)
        self.holding.discard(worker)
        self.waiting.discard(worker)
        self.last.pop(worker, None)
        self.look()

    @rule()
    def finish(self) -> None:
        decided = self.quorum.decide()
        assert (decided is None) == (not self.waiting)
        self.look()

    def look(self) -> None:
        """Who has waited and is accepted now made up one step together."""
        told = {worker: self.quorum.accepted(worker) for worker in self.waiting}
        fresh = {worker: each for worker, each in told.items() if each is not None and each.step not in self.steps}
        if fresh:
            [accepted] = set(fresh.values())
            assert accepted.completes == len(fresh)
            self.steps[accepted.step] = set(fresh)
            self.last |= dict.fromkeys(fresh, accepted.step)
            self.waiting -= set(fresh)

    @invariant()
    def nobody_waits_for_those_who_do_not_come(self) -> None:
        waiting: set[int] = getattr(self, "waiting", set())
        if waiting:
            assert len(waiting) < max(1, len(self.holding) - self.backups)

    @invariant()
    def steps_follow_one_another(self) -> None:
        assert sorted(getattr(self, "steps", {})) == list(range(len(getattr(self, "steps", {}))))


TestStepsWithBackups: Any = StepsWithBackups.TestCase


def test_a_step_that_waits_is_decided_when_others_end() -> None:
    quorum = Quorum(0)
    for worker in range(3):
        quorum.begin(worker)
    assert quorum.arrive(0, 0) == "waiting"
    quorum.end(1)
    assert quorum.accepted(0) is None
    quorum.forget(2)
    assert quorum.accepted(0) == Accepted(step=0, completes=1)
    assert quorum.arrive(0, 0) == "accepted"  # told twice


def test_who_died_is_no_part_of_what_is_not_decided() -> None:
    quorum = Quorum(0)
    for worker in range(3):
        quorum.begin(worker)
    quorum.arrive(0, 0)
    quorum.arrive(1, 0)
    quorum.forget(0)
    assert quorum.arrive(2, 0) == "accepted"
    assert quorum.accepted(1) == Accepted(step=0, completes=2)
    assert quorum.accepted(0) is None


ONE, OTHER = Sender(0, 0), Sender(1, 0)


def in_steps(backups: int = 0) -> SyncSteps:
    sync = SyncSteps(rd.SyncWithBackups(backups))
    sync.begin(ONE, 0)
    sync.begin(OTHER, 1)
    return sync


def test_nobody_waits_without_a_rule() -> None:
    sync = SyncSteps("async")
    for closure in range(5):
        sync.begin(ONE, closure)
    assert (sync.in_steps, sync.decide(), sync.arrive(ONE, PushKey(0, 0), 0)) == (False, None, None)
    assert sync.fence(ONE) is None


def test_an_arrival_that_is_told_twice_counts_once() -> None:
    sync = in_steps()
    first = sync.arrive(ONE, PushKey(0, 0), 0)
    again = sync.arrive(ONE, PushKey(0, 0), 0)
    assert first is not None
    assert first == again
    assert sync.accepted(first) is None
    second = sync.arrive(OTHER, PushKey(1, 0), 0)
    assert second is not None
    assert sync.accepted(first) == sync.accepted(second) == Accepted(0, 2)
    assert sync.arrive(ONE, PushKey(0, 0), 0) == first


def test_what_the_dead_were_accepted_with_is_never_late() -> None:
    """Some servers may have it: the others must get it."""
    sync = in_steps()
    sync.arrive(ONE, PushKey(0, 0), 0)
    sync.arrive(OTHER, PushKey(1, 0), 0)
    assert sync.fence(ONE) == Accepted(0, 2)
    successor = Sender(0, 1)
    sync.begin(successor, 0)
    assert sync.fence(ONE) == Accepted(0, 2)  # told twice
    owed = sync.arrive(successor, PushKey(0, 0), 0)
    assert owed is not None
    assert owed.step == 1
    assert sync.arrive(successor, PushKey(0, 1), 0) is None
    sync.fence(successor)  # before it was decided
    again = Sender(0, 2)
    sync.begin(again, 0)
    owed = sync.arrive(again, PushKey(0, 0), 0)
    assert owed is not None
    other = sync.arrive(OTHER, PushKey(1, 1), 1)
    assert other is not None
    assert sync.accepted(owed) == sync.accepted(other) == Accepted(1, 2)


def test_the_dead_who_were_not_accepted_leave_nothing_behind() -> None:
    sync = in_steps()
    sync.arrive(ONE, PushKey(0, 0), 0)
    assert sync.fence(ONE) is None
    alone = sync.arrive(OTHER, PushKey(1, 0), 0)
    assert alone is not None
    assert sync.accepted(alone) == Accepted(0, 1)
    assert sync.arrive(Sender(0, 1), PushKey(0, 0), 0) is None


def test_what_has_ended_is_owed_no_more() -> None:
    sync = in_steps(1)
    sync.arrive(ONE, PushKey(0, 0), 0)
    assert sync.fence(ONE) == Accepted(0, 1)
    assert sync.arrive(OTHER, PushKey(1, 0, finished_below=1), 0) is None
    assert sync._owed == set()


WORKERS = [Sender(worker, 0) for worker in range(3)]


def later(server: ParameterServer, request: ServerRequest, *tensors: torch.Tensor) -> DelayedAnswer:
    reply = server.handle(request, tensors)
    assert isinstance(reply, DelayedAnswer)
    return reply


def due(server: ParameterServer) -> dict[DelayedAnswer, ServerAnswer]:
    told = server.due()
    return {which: each[0] for which, each in told if not isinstance(each, Exception)}


def with_parameter(server: ParameterServer) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))]
    BareWorker([server], parameters, torch.optim.SGD(parameters, lr=1.0))


def test_the_dead_wait_no_more() -> None:
    with servers(1, rd.SyncWithBackups(0)) as [server]:
        slow, fast, _ = WORKERS
        answer(server, BeginClosure(slow, 0))
        answer(server, BeginClosure(fast, 1))
        arrived = later(server, Arrive(fast, PushKey(1, 0), 0))
        answer(server, FenceWorker(fast))
        assert due(server)[arrived].verdict == "fenced"
        for request in (BeginClosure(fast, 3), EndClosure(fast, 3)):
            assert answer(server, request).verdict == "fenced"
        assert server.num_waiting == 0


def push(sender: Sender, step: int, completes: int, closure: int) -> Push:
    key = PushKey(closure, 0)
    return Push(sender, key, OPTIMIZER, (0,), ("dense",), step=step, completes=completes, pull=(0,))


def gradient(value: float) -> torch.Tensor:
    return torch.full((2,), value, dtype=torch.float64)


def test_a_step_with_a_backup() -> None:
    with servers(1, rd.SyncWithBackups(1)) as [server]:
        with_parameter(server)
        for closure, sender in enumerate(WORKERS):
            answer(server, BeginClosure(sender, closure))
        first = later(server, Arrive(WORKERS[2], PushKey(2, 0), 0))
        assert due(server) == {}
        second = answer(server, Arrive(WORKERS[0], PushKey(0, 0), 0))
        assert (second.verdict, second.step, second.completes) == ("applied", 0, 2)
        assert due(server)[first].completes == 2
        assert answer(server, Arrive(WORKERS[1], PushKey(1, 0), 0)).verdict == "late"
        waiting = later(server, Pull((0,), WORKERS[1], at_least_step=1))
        pushed = later(server, push(WORKERS[2], 0, 2, closure=2), gradient(1.0))
        told, tensors = ask(server, push(WORKERS[0], 0, 2, closure=0), gradient(3.0))
        assert (told.step, tensors[0].tolist()) == (1, [-2, -2])
        answered = due(server)
        assert answered[pushed].verdict == "applied"
        assert answered[waiting].step == 1
        assert answer(server, push(WORKERS[1], 0, 0, closure=1), gradient(9.0)).verdict == "late"
        stats = answer(server, Statistics()).value
        assert (stats.late, stats.steps, stats.pushes) == (2, 1, 2)
        assert stats.staleness == {1: 2}  # they had read version 0, and it was 1


def test_who_begins_after_a_step_was_decided_is_told_to_wait_for_its_values() -> None:
    """Without backups nobody is late."""
    with servers(1, rd.SyncWithBackups(0)) as [server]:
        with_parameter(server)
        assert answer(server, BeginClosure(WORKERS[0], 0)).step == 0
        assert answer(server, Arrive(WORKERS[0], PushKey(0, 0), 0)).completes == 1
        told = answer(server, BeginClosure(WORKERS[1], 1))
        assert told.step == 1
        pull = later(server, Pull((0,), WORKERS[1], at_least_step=told.step))
        answer(server, push(WORKERS[0], 0, 1, closure=0), gradient(1.0))
        assert due(server)[pull].step == 1
        later(server, Arrive(WORKERS[1], PushKey(1, 0), 1))


def test_an_incomplete_step_can_be_finished() -> None:
    with servers(2, rd.SyncWithBackups(0)) as [zero, one]:
        with_parameter(zero)
        with_parameter(one)
        told = answer(zero, Finish())
        assert (told.step, told.completes) == (0, 0)
        answer(zero, BeginClosure(WORKERS[0], 0))
        answer(zero, BeginClosure(WORKERS[1], 1))
        arrived = later(zero, Arrive(WORKERS[0], PushKey(0, 0), 0))
        told = answer(zero, Finish())
        assert (told.step, told.completes) == (0, 1)
        assert due(zero)[arrived].completes == 1
        for server in (zero, one):
            finished = later(server, Finish(told.step, told.completes))
            answer(server, push(WORKERS[0], 0, 1, closure=0), gradient(1.0))
            assert due(server)[finished].step == 1
        assert answer(one, Finish(5, 0)).verdict == "done"


def test_servers_do_not_wait_for_the_dead() -> None:
    with servers(2, rd.SyncWithBackups(0)) as both:
        for server in both:
            with_parameter(server)
        for closure, sender in enumerate(WORKERS[:2]):
            answer(both[0], BeginClosure(sender, closure))
        later(both[0], Arrive(WORKERS[0], PushKey(0, 0), 0))
        answer(both[0], Arrive(WORKERS[1], PushKey(1, 0), 0))
        delayed = [later(server, push(WORKERS[1], 0, 2, closure=1), gradient(2.0)) for server in both]
        answer(both[1], push(WORKERS[0], 0, 2, closure=0), gradient(4.0))  # then it dies
        told = [answer(server, FenceWorker(WORKERS[0])) for server in both][0]
        assert (told.step, told.completes) == (0, 2)
        for server in both:
            answer(server, DropArrival(WORKERS[0], told.step, told.completes))
        assert [delayed[number] in due(server) for number, server in enumerate(both)] == [True, True]
        assert [ask(server, Pull((0,)))[1][0].tolist() for server in both] == [[-2, -2], [-3, -3]]


def test_arrivals_belong_to_steps() -> None:
    message = "under rd.SyncWithBackups only, but worker 2"
    with servers() as [server], pytest.raises(rd.InvalidArgumentError, match=message):
        server.handle(Arrive(WORKERS[2], PushKey(0, 0), 0))
