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
from raydist.parameter_servers.connection import (
    RequestDispatcher,
    ServerConnection,
    copy_to_targets,
)
from raydist.parameter_servers.requests import (
    Arrive,
    CreateSlices,
    Finish,
    Pull,
    PushKey,
    Sender,
    ServerAnswer,
    Statistics,
)
from raydist.parameter_servers.slices import PsSlice
from raydist.parameter_servers.slicing import SlicesByHandle, add_slices
from raydist.parameter_servers.table_spec import EmbeddingTableSpec
from tests.contracts.server_connection import ServerConnectionContract
from tests.parameter_servers.examples import slice_of
from tests.parameter_servers.local_server import LocalConnection, PlainServer


class TestLocalConnection(ServerConnectionContract):
    @contextmanager
    def connections(self, count: int) -> Iterator[list[ServerConnection]]:
        server = PlainServer()
        yield [LocalConnection(server)] * count


def answer_of(answer: ServerAnswer, tensors: object) -> ServerAnswer:
    return answer


def test_each_is_answered_once_when_it_may_be() -> None:
    server = PlainServer()
    dispatcher = RequestDispatcher(server)
    order: list[str] = []

    def submit(name: str, step: int) -> None:
        dispatcher.submit(Pull((), at_least_step=step), (), lambda answer, tensors: order.append(name))

    for name, step in (("a", 1), ("b", 2), ("c", 0), ("d", 1)):
        submit(name, step)
    assert order == ["c"]
    finished = dispatcher.submit(Finish(), (), answer_of)
    assert order == ["c", "a", "d"]
    assert finished.result(0).step == 1
    dispatcher.submit(Finish(), (), answer_of)
    assert order[3:] == ["b"]


def test_an_answer_that_cannot_be_packed_is_an_error_of_its_own_client() -> None:
    def fail(answer: object, tensors: object) -> None:
        raise MemoryError("no room for the answer")

    dispatcher = RequestDispatcher(PlainServer())
    waiting = dispatcher.submit(Pull((), at_least_step=1), (), fail)
    assert dispatcher.submit(Finish(), (), answer_of).result(0).step == 1
    assert isinstance(waiting.exception(0), MemoryError)


def test_values_go_where_they_are_wanted() -> None:
    targets = torch.nn.Parameter(torch.zeros(2)), torch.zeros(3)
    copy_to_targets(targets, [])
    copy_to_targets(targets, [torch.full((2,), 2.0), torch.ones(3)])
    assert (targets[0].tolist(), targets[1].tolist()) == ([2, 2], [1, 1, 1])
    with pytest.raises(rd.InvalidArgumentError, match="raydist bug: an answer must have the values of 2 slices, got 1"):
        copy_to_targets(targets, [torch.ones(3)])


ME = Sender(0, 0)


@contextmanager
def client(count: int = 2, timeout_s: float = 20.0) -> Iterator[tuple[ServerClient, list[PlainServer]]]:
    servers = [PlainServer(number) for number in range(count)]
    made = ServerClient([LocalConnection(server) for server in servers], ME, timeout_s=timeout_s)
    for number in range(count):
        values = [torch.full((2,), float(number)).double()]
        made.exchange({number: Ask(CreateSlices((slice_of(number, 2),)), values)})
    yield made, servers


def targets(count: int = 2) -> dict[int, dict[int, torch.Tensor]]:
    return {number: {number: torch.full((2,), -1.0).double()} for number in range(count)}


def test_all_are_asked_and_what_is_there_already_is_not_read() -> None:
    with client() as (made, _):
        into = targets()
        answers = made.read(into, unless={0: 1})
        assert {server: answer.version for server, answer in answers.items()} == {0: 1, 1: 1}
        assert (into[0][0].tolist(), into[1][1].tolist()) == ([-1, -1], [1, 1])
        assert made.read({0: {}}) == {}
        assert [answer.value["CreateSlices"] for answer in made.ask_all(Statistics())] == [1, 1]


def test_an_error_of_one_comes_when_all_have_answered_and_no_target_changes() -> None:
    with client() as (made, servers):
        into = targets()
        asks = {0: Ask(Arrive(ME, PushKey(0, 0), 0)), 1: Ask(Pull((1,)), into=into[1])}
        with pytest.raises(rd.InvalidArgumentError, match="plain things"):
            made.exchange(asks)
        assert (servers[1].counts["Pull"], into[1][1].tolist()) == (1, [-1, -1])


def test_a_step_is_read_from_all() -> None:
    with client() as (made, servers):
        for _ in range(2):
            made.ask(0, Finish())
        into = targets()
        late = threading.Timer(0.1, lambda: [made._connections[1].ask(Finish()).answer(10) for _ in range(2)])
        late.start()
        answers = made.read_step(into, at_least=1)
        assert {answer.step for answer in answers.values()} == {2}
        assert into[1][1].tolist() == [1, 1]
        late.join(10)
        assert servers[1].step == 2


def test_a_step_that_does_not_come_is_an_error() -> None:
    with client(timeout_s=0.1) as (made, _), pytest.raises(rd.DeadlineExceededError):
        made.read_step(targets(), at_least=1)
    with client() as (made, _):
        assert made.ask(0, Pull(())).version == 1


SPEC = EmbeddingTableSpec(1_000, 2)


def test_a_table_that_the_servers_do_not_have_is_told() -> None:
    embedding = rd.ShardedEmbedding(10, 2)
    rows = PsRows(ServerClient((), Sender(0, 0), timeout_s=1), lambda weight: None)
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
    client = ServerClient((), Sender(0, 0), timeout_s=1.0)
    handles = {id(obj): handle for handle, obj in objects.items()}
    held = PlacedVariables(client, table, objects.get, lambda obj: handles.get(id(obj)), lambda _: None)
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
