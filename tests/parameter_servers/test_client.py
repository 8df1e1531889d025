from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd
from raydist.parameter_servers.client import Ask, PlacedVariables, PsRows, ServerClient
from raydist.parameter_servers.connection import RequestDispatcher, ServerConnection
from raydist.parameter_servers.requests import (
    CreateSlices,
    Pull,
    Sender,
    Statistics,
)
from raydist.parameter_servers.server import ParameterServer
from raydist.parameter_servers.slices import PsSlice
from raydist.parameter_servers.slicing import SlicesByHandle, add_slices
from tests.contracts.server_connection import ServerConnectionContract
from tests.parameter_servers.examples import LocalConnection, create, finish_step, optimizer_of, servers, slice_of


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


ME = Sender(0, 0)


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


def test_variables_are_known_by_their_memory() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    objects: dict[int, Any] = {1: model, 2: model.weight, 3: model.bias, 4: optimizer}
    table: SlicesByHandle = {}
    slices = [PsSlice(number, 2, "weight", number, number, (1, 4), torch.float32) for number in range(2)]
    others = [PsSlice(2, 3, "bias", 0, 0, (2,), torch.float32), PsSlice(3, 5, "x", 0, 0, (), torch.float32)]
    add_slices(table, [*slices, *others])
    handles = {id(obj): handle for handle, obj in objects.items()}
    unused = ServerClient((), ME, timeout_s=1.0)
    held = PlacedVariables(unused, table, objects.get, lambda obj: handles.get(id(obj)), lambda _: None)
    found = held.places(
        {
            **model.state_dict(),
            "copy": model.weight.detach().clone(),
            "row": model.weight.detach()[0],
            "turned": model.weight.detach().T,
            "none": torch.empty(0),
        }
    )
    assert found == {"weight": tuple(slices), "bias": table[3]}
    assert held.handle_of(optimizer) == 4
