from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import raydist as rd
from raydist.parameter_servers.connection import (
    RequestDispatcher,
    ServerConnection,
    copy_to_targets,
    server_is_gone,
    server_is_late,
)
from raydist.parameter_servers.requests import Arrive, Finish, Pull, PushKey, Sender, ServerAnswer
from tests.contracts.server_connection import ServerConnectionContract
from tests.parameter_servers.local_connection import LocalConnection
from tests.parameter_servers.plain_server import PlainServer


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


def test_errors_are_for_the_client_that_asked() -> None:
    server = PlainServer()
    asked = RequestDispatcher(server).submit(Arrive(Sender(0, 0), PushKey(0, 0), 0), (), answer_of)
    assert "must be asked plain things" in str(asked.exception(0))


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


def test_errors_name_the_server() -> None:
    assert "parameter server 3" in str(server_is_late("parameter server 3", 1.5))
    assert server_is_gone("parameter server 3").actor == "parameter server 3"
