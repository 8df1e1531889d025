from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import raydist as rd
from raydist.parameter_servers.changes import DelayedAnswer
from raydist.parameter_servers.consistency import require_consistency
from raydist.parameter_servers.requests import (
    Arrive,
    BeginClosure,
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
from raydist.parameter_servers.sync_steps import Arrival, SyncSteps
from tests.parameter_servers.examples import answer, ask, create, push_of, servers

NUMBERS = st.integers(0, 3)


class StepsWithBackups(RuleBasedStateMachine):
    """Workers that hold closures, arrive, end and die in any order."""

    @initialize(backups=st.integers(0, 3))
    def start(self, backups: int) -> None:
        self.backups = backups
        self.sync = SyncSteps(backups)
        self.generations = [0] * 4
        self.closures = 0
        self.holding: dict[int, int] = {}
        self.waiting: dict[int, Arrival] = {}
        self.steps: dict[int, int] = {}

    def sender(self, worker: int) -> Sender:
        return Sender(worker, self.generations[worker])

    @rule(worker=NUMBERS)
    def begin(self, worker: int) -> None:
        if worker not in self.waiting:
            self.closures += 1
            self.holding[worker] = self.closures
            self.sync.begin(self.sender(worker), self.closures)

    @rule(worker=NUMBERS, behind=st.integers(0, 2))
    def arrive(self, worker: int, behind: int) -> None:
        if worker not in self.holding or worker in self.waiting:
            return
        self.closures += 1
        key, step = PushKey(self.closures, 0), max(0, self.sync.step - behind)
        is_late = step < self.sync.step
        arrival = self.sync.arrive(self.sender(worker), key, step)
        assert (arrival is None) == is_late
        if arrival is not None:
            self.waiting[worker] = arrival
            assert self.sync.arrive(self.sender(worker), key, step) is arrival, "it counts once"
        self.look()

    @rule(worker=NUMBERS)
    def end(self, worker: int) -> None:
        if worker not in self.waiting:
            self.sync.end(self.sender(worker))
            self.holding.pop(worker, None)
            self.look()

    @rule(worker=NUMBERS)
    def die(self, worker: int) -> None:
        first = self.sync.fence(self.sender(worker))
        self.holding.pop(worker, None)
        self.waiting.pop(worker, None)
        assert self.sync.fence(self.sender(worker)) is first
        self.generations[worker] += 1
        self.look()

    @rule()
    def finish(self) -> None:
        assert self.sync.decide() == len(self.waiting)
        self.look()

    def look(self) -> None:
        """Those that have waited and are accepted now make up one step together."""
        accepted = {worker: each for worker, each in self.waiting.items() if each.completes}
        if accepted:
            [(step, completes)] = {(each.step, each.completes) for each in accepted.values()}
            assert completes == len(accepted) == len(self.waiting)
            self.steps[step] = completes
            self.waiting.clear()

    @invariant()
    def nobody_waits_for_those_who_do_not_come(self) -> None:
        waiting: dict[int, Arrival] = getattr(self, "waiting", {})
        if waiting:
            assert len(waiting) < max(1, len(self.holding) - self.backups)

    @invariant()
    def steps_follow_one_another(self) -> None:
        assert sorted(getattr(self, "steps", {})) == list(range(len(getattr(self, "steps", {}))))


TestStepsWithBackups: Any = StepsWithBackups.TestCase


def test_the_accepted_gradient_of_a_dead_worker_is_never_late() -> None:
    """Some servers may have it: the others must get it."""
    one, other, sync = Sender(0, 0), Sender(1, 0), SyncSteps(0)
    sync.begin(one, 0)
    sync.begin(other, 1)
    sync.arrive(one, PushKey(0, 0), 0)
    sync.arrive(other, PushKey(1, 0), 0)
    dead = sync.fence(one)
    assert dead is not None
    assert (dead.step, dead.completes) == (0, 2)
    successor = Sender(0, 1)
    sync.begin(successor, 0)
    assert sync.fence(one) is dead  # told twice
    assert sync._holding == {0: (1, 0), 1: (0, 1)}, "the successor holds its closure"
    owed = sync.arrive(successor, PushKey(0, 0), 0)
    assert owed is not None
    assert owed.step == 1
    assert sync.arrive(successor, PushKey(0, 1), 0) is None
    sync.fence(successor)  # before it was decided
    again = Sender(0, 2)
    sync.begin(again, 0)
    owed, last = sync.arrive(again, PushKey(0, 0), 0), sync.arrive(other, PushKey(1, 1), 1)
    assert owed is not None
    assert last is not None
    assert (owed.step, owed.completes) == (last.step, last.completes) == (1, 2)
    assert sync.arrive(other, PushKey(1, 2, finished_below=1), 1) is None
    assert sync.arrive(again, PushKey(0, 0), 0) is owed


WORKERS = [Sender(worker, 0) for worker in range(3)]


def later(server: ParameterServer, request: ServerRequest, *tensors: torch.Tensor) -> DelayedAnswer:
    reply = server.handle(request, tensors)
    assert isinstance(reply, DelayedAnswer)
    return reply


def due(server: ParameterServer) -> dict[DelayedAnswer, ServerAnswer]:
    told = server.due()
    return {which: each[0] for which, each in told if not isinstance(each, Exception)}


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
    return push_of(PushKey(closure, 0), sender, step=step, completes=completes, pull=(0,))


def gradient(value: float) -> torch.Tensor:
    return torch.full((2,), value, dtype=torch.float64)


def test_a_step_with_a_backup() -> None:
    with servers(1, rd.SyncWithBackups(1)) as [server]:
        create(server, 2, lr=1.0)
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


def test_an_incomplete_step_can_be_finished() -> None:
    with servers(2, rd.SyncWithBackups(0)) as [zero, one]:
        create(zero, 2, lr=1.0)
        create(one, 2, lr=1.0)
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


def test_arrivals_belong_to_steps() -> None:
    message = "under rd.SyncWithBackups only, but worker 2"
    with servers() as [server], pytest.raises(rd.InvalidArgumentError, match=message):
        server.handle(Arrive(WORKERS[2], PushKey(0, 0), 0))


def test_consistency_is_one_of_three_kinds() -> None:
    for sound in ("async", rd.BoundedStaleness(0), rd.SyncWithBackups(2)):
        assert require_consistency(sound) == sound
    for bad in ("sync", 3, None, rd.SyncWithBackups):
        with pytest.raises(rd.InvalidArgumentError, match=r"consistency must be \"async\", rd.BoundedStaleness"):
            require_consistency(bad)
    kinds: list[Any] = [rd.BoundedStaleness, rd.SyncWithBackups]
    for kind, number in itertools.product(kinds, (-1, 1.0, True, None, "2")):
        with pytest.raises(rd.InvalidArgumentError, match=rf"{kind.__name__} must be given an int >= 0 \(\w+\), got"):
            kind(number)
