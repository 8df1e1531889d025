from __future__ import annotations

import pytest
import torch

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
from raydist.parameter_servers.serving.changes import Later
from tests.parameter_servers.served import OPTIMIZER, BareWorker, answer, ask, servers

WORKERS = [Sender(worker, 0) for worker in range(3)]


def later(server: ParameterServer, request: ServerRequest, *tensors: torch.Tensor) -> Later:
    reply = server.handle(request, tensors)
    assert isinstance(reply, Later)
    return reply


def due(server: ParameterServer) -> dict[Later, ServerAnswer]:
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
        waits = [later(server, push(WORKERS[1], 0, 2, closure=1), gradient(2.0)) for server in both]
        answer(both[1], push(WORKERS[0], 0, 2, closure=0), gradient(4.0))  # then it dies
        told = [answer(server, FenceWorker(WORKERS[0])) for server in both][0]
        assert (told.step, told.completes) == (0, 2)
        for server in both:
            answer(server, DropArrival(WORKERS[0], told.step, told.completes))
        assert [waits[number] in due(server) for number, server in enumerate(both)] == [True, True]
        assert [ask(server, Pull((0,)))[1][0].tolist() for server in both] == [[-2, -2], [-3, -3]]


def test_arrivals_belong_to_steps() -> None:
    message = "under rd.SyncWithBackups only, but worker 2"
    with servers() as [server], pytest.raises(rd.InvalidArgumentError, match=message):
        server.handle(Arrive(WORKERS[2], PushKey(0, 0), 0))
