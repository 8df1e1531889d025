"""A parameter server: what it is asked, whom it fences, its slices, and steps that several workers make together."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import raydist as rd
from raydist.core.errors import InvalidArgumentError
from raydist.parameter_servers.changes import DelayedAnswer
from raydist.parameter_servers.client import Ask, PsRows, ServerClient
from raydist.parameter_servers.connection import RequestDispatcher, ServerConnection
from raydist.parameter_servers.consistency import require_consistency
from raydist.parameter_servers.requests import (
    Arrive,
    Assign,
    BeginClosure,
    BeginSave,
    CreateSlices,
    DiscardRestore,
    Finish,
    OptimizerState,
    Pull,
    PullRows,
    Push,
    PushKey,
    RowState,
    Sender,
    ServerAnswer,
    ServerRequest,
    SetOptimizerState,
    Statistics,
)
from raydist.parameter_servers.server import ParameterServer
from raydist.parameter_servers.sync_steps import SyncSteps
from tests.contracts.server_connection import ServerConnectionContract
from tests.parameter_servers.examples import (
    ME,
    OPTIMIZER,
    LocalConnection,
    answer,
    ask,
    create,
    finish_step,
    optimizer_of,
    push_of,
    servers,
    slice_of,
)

GRADIENT = torch.ones(2, dtype=torch.float64)


def test_what_it_did_is_counted_and_what_has_not_changed_is_not_sent() -> None:
    with servers() as [server]:
        create(server, 2)
        told, tensors = ask(server, Pull((0,)))
        assert len(tensors) == 1
        assert ask(server, Pull((0,), unless=told.version))[1] == []
        for key in range(3):
            answer(server, push_of(PushKey(key, 0), read_version=1), GRADIENT)
        answer(server, push_of(PushKey(0, 0)), GRADIENT)
        assert len(ask(server, Pull((0,), unless=told.version))[1]) == 1
        stats = answer(server, Statistics()).value
        assert (stats.server, stats.pulls, stats.pushes, stats.repeated) == (0, 2, 3, 1)
        assert (stats.bytes_pulled, stats.bytes_pushed) == (2 * 16, 48)
        assert stats.staleness == {0: 1, 1: 1, 2: 1}
        assert stats.version == 4
        assert stats.bytes_held == 16
        assert 0 < stats.apply_seconds < math.inf


class Unheard(ServerRequest):
    pass


def test_what_is_not_there() -> None:
    requests: list[tuple[ServerRequest, list[torch.Tensor], str]] = [
        (Unheard(), [], r"a ServerRequest that they know, got Unheard"),
        (Pull((3,)), [], r"not number 3"),
        (OptimizerState(3), [], r"Optimizers must be added .* has \[\] and not 3"),
        (RowState(3), [], r"Embedding tables must be created .* has \[\] and not 3"),
        (PullRows(3), [torch.ones(2)], r"one int64 tensor of their numbers, got \[torch.float32\]"),
        (Push(ME, PushKey(0, 0), 4, (), ()), [], r"optimizer that the server has, got handle 4 of \[\]"),
        (Assign(ME, PushKey(1, 1), (0, 1), (False, True)), [GRADIENT], r"each of 2 slices, got 1 of them and 2 marks"),
        (BeginSave("order"), [], "got BeginSave"),  # it has nothing that saves
        (DiscardRestore(), [], "got DiscardRestore"),
    ]
    with servers() as [server]:
        answer(server, CreateSlices((slice_of(0, 2), slice_of(1))), GRADIENT, torch.tensor(5.0).double())
        for request, tensors, message in requests:
            with pytest.raises(InvalidArgumentError, match=message):
                server.handle(request, tensors)
    with pytest.raises(InvalidArgumentError, match=r'consistency must be "async"'), servers(1, "sync"):  # type: ignore[arg-type]
        pass


def test_a_restore_of_what_does_not_fit_changes_nothing() -> None:
    with servers() as [server]:
        create(server, 2)
        with pytest.raises(InvalidArgumentError, match="not number 9"):
            server._state.replace({}, {0: GRADIENT}, {OPTIMIZER: {9: {}}})
        for values in ({0: GRADIENT, 9: GRADIENT}, {0: GRADIENT[:1]}, {0: GRADIENT.float()}):
            with pytest.raises(InvalidArgumentError):
                server._state.replace({}, values, {})
        assert ask(server, Pull((0,)))[1][0].tolist() == [0, 0]


def test_an_optimizer_keeps_what_it_remembers_when_it_is_added_again() -> None:
    with servers() as [server]:
        create(server, 2, lr=1.0, momentum=0.5)
        answer(server, push_of(PushKey(0, 0)), GRADIENT)
        create(server, 2, lr=1.0, momentum=0.5)
        states = answer(server, OptimizerState(OPTIMIZER)).value
        assert states[0]["momentum_buffer"].tolist() == [1, 1]
        answer(server, SetOptimizerState(OPTIMIZER, {0: {"momentum_buffer": torch.full((2,), 4.0).double()}}))
        answer(server, push_of(PushKey(1, 0)), GRADIENT)
        assert answer(server, OptimizerState(OPTIMIZER)).value[0]["momentum_buffer"].tolist() == [3, 3]


def test_room_for_what_an_optimizer_remembers() -> None:
    with servers(memory=20_000) as [server]:
        create(server, 1000)
    message = r"server 0 is to hold 16,000 bytes for a Adam and has 12,000 free: 4,000 too few"
    with servers(memory=20_000) as [server], pytest.raises(InvalidArgumentError, match=message):
        create(server, 1000, kind=torch.optim.Adam)


WORKERS = [Sender(worker, 0) for worker in range(3)]


def later(server: ParameterServer, request: ServerRequest, *tensors: torch.Tensor) -> DelayedAnswer:
    reply = server.handle(request, tensors)
    assert isinstance(reply, DelayedAnswer)
    return reply


def due(server: ParameterServer) -> dict[DelayedAnswer, ServerAnswer]:
    told = server.due()
    return {which: each[0] for which, each in told if not isinstance(each, Exception)}


def push(sender: Sender, step: int, completes: int, closure: int) -> Push:
    return push_of(PushKey(closure, 0), sender, step=step, completes=completes, pull=(0,))


def gradient(value: float) -> torch.Tensor:
    return torch.full((2,), value, dtype=torch.float64)


def test_a_gradient_of_the_dead_that_some_servers_have_is_never_late() -> None:
    one, other, sync = Sender(0, 0), Sender(1, 0), SyncSteps(0)
    sync.begin(one, 0)
    sync.begin(other, 1)
    sync.arrive(one, PushKey(0, 0), 0)
    sync.arrive(other, PushKey(1, 0), 0)
    dead = sync.fence(one)
    assert dead is not None
    assert (dead.step, dead.completes, sync.fence(one)) == (0, 2, dead)
    successor = Sender(0, 1)
    sync.begin(successor, 0)
    owed = sync.arrive(successor, PushKey(0, 0), 0)
    assert owed is not None
    assert owed.step == 1
    assert sync.arrive(successor, PushKey(0, 1), 0) is None, "another one is late"


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
        sent = gradient(1.0)
        pushed = later(server, push(WORKERS[2], 0, 2, closure=2), sent)
        sent.fill_(torch.nan)  # the server has a copy
        told, tensors = ask(server, push(WORKERS[0], 0, 2, closure=0), gradient(3.0))
        assert (told.step, tensors[0].tolist()) == (1, [-2, -2])
        answered = due(server)
        assert answered[pushed].verdict == "applied"
        assert answered[waiting].step == 1
        assert (due(server), server.num_waiting) == ({}, 0), "each is answered once"
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


# --- clients of servers -----------------------------------------------------------------------------------------------


class TestLocalConnection(ServerConnectionContract):
    @contextmanager
    def connections(self, count: int) -> Iterator[list[ServerConnection]]:
        with servers(1, rd.SyncWithBackups(0)) as [server]:
            yield [LocalConnection(server)] * count


def test_an_answer_that_cannot_be_given_is_an_error_of_its_own_client() -> None:
    def fail(answer: object, tensors: object) -> None:
        raise MemoryError("no room for the answer")

    with servers(1, rd.SyncWithBackups(0)) as [server]:
        create(server, 2)
        dispatcher = RequestDispatcher(server)
        waiting = dispatcher.submit(Pull((), at_least_step=1), (), fail)
        finish_step(lambda request: dispatcher.submit(request, (), lambda answer, tensors: answer).result(0))
        assert isinstance(waiting.exception(0), MemoryError)


@contextmanager
def client(count: int = 2, timeout_s: float = 20.0) -> Iterator[tuple[ServerClient, list[ParameterServer]]]:
    with servers(count, rd.SyncWithBackups(0)) as held:
        made = ServerClient([LocalConnection(server) for server in held], ME, timeout_s=timeout_s)
        for number in range(count):
            values = [torch.full((2,), float(number)).double()]
            made.exchange({number: Ask(CreateSlices((slice_of(number, 2),)), values)})
            made.ask(number, optimizer_of(number))
        yield made, held


def targets(count: int = 2) -> dict[int, dict[int, torch.Tensor]]:
    return {number: {number: torch.full((2,), -1.0).double()} for number in range(count)}


def test_all_are_asked_and_what_is_there_already_is_not_read() -> None:
    with client() as (made, _):
        into = targets()
        answers = made.read(into, unless={0: 1})
        assert {server: answer.version for server, answer in answers.items()} == {0: 1, 1: 1}
        assert (into[0][0].tolist(), into[1][1].tolist()) == ([-1, -1], [1, 1])
        assert made.read({0: {}}) == {}
        assert [answer.value.server for answer in made.ask_all(Statistics())] == [0, 1]


def test_an_error_of_one_comes_when_all_have_answered_and_no_target_changes() -> None:
    with client() as (made, held):
        into = targets()
        asks = {0: Ask(Pull((7,))), 1: Ask(Pull((1,)), into=into[1])}
        with pytest.raises(rd.InvalidArgumentError, match="not number 7"):
            made.exchange(asks)
        assert (held[1].stats.pulls, into[1][1].tolist()) == (1, [-1, -1])


def test_a_step_is_read_from_all_within_a_limit() -> None:
    with client(timeout_s=0.1) as (made, _), pytest.raises(rd.DeadlineExceededError):
        made.read_step(targets(), at_least=1)
    with client() as (made, held):
        for _ in range(2):
            finish_step(lambda request: made.ask(0, request))
        into = targets()
        other = made._connections[1]
        late = threading.Timer(
            0.1, lambda: [finish_step(lambda request: other.ask(request).answer(10)[0]) for _ in range(2)]
        )
        late.start()
        answers = made.read_step(into, at_least=1)
        assert {answer.step for answer in answers.values()} == {2}
        assert into[1][1].tolist() == [1, 1]
        late.join(10)
        assert held[1].stats.steps == 2


def test_a_table_that_the_servers_do_not_have_is_told() -> None:
    embedding = rd.ShardedEmbedding(10, 2)
    rows = PsRows(ServerClient((), ME, timeout_s=1), lambda weight: None)
    with pytest.raises(rd.FailedPreconditionError, match="must be made under the scope"):
        rows.pull(embedding.weight, torch.tensor([1]))
