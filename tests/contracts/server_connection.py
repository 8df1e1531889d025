"""The contract of every connection to a parameter server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import raydist as rd
from raydist.parameter_servers.connection import ServerConnection
from raydist.parameter_servers.requests import (
    Assign,
    CreateSlices,
    Pull,
    Push,
    PushKey,
    Sender,
    ServerAnswer,
    ServerRequest,
    Statistics,
)
from raydist.parameter_servers.slices import PsSlice
from tests.parameter_servers.examples import OPTIMIZER, finish_step, optimizer_of, slice_of

LIMIT_S = 20.0


def ask(
    connection: ServerConnection, request: ServerRequest, *tensors: torch.Tensor
) -> tuple[ServerAnswer, list[torch.Tensor]]:
    answer, values = connection.ask(request, tensors).answer(LIMIT_S)
    return answer, [value.clone() for value in values]


def create(connection: ServerConnection, *slices: PsSlice) -> None:
    """Create slices of zeros, and an optimizer that subtracts gradients."""
    ask(connection, CreateSlices(slices), *(torch.zeros(each.shape, dtype=each.dtype) for each in slices))
    ask(connection, optimizer_of(*(each.number for each in slices), lr=1.0))


def push_of(number: int, worker: int = 0, closure: int = 1, **fields: Any) -> Push:
    return Push(Sender(worker, 0), PushKey(closure, 0), OPTIMIZER, (number,), ("dense",), **fields)


Connections = Sequence[ServerConnection]


def values_come_and_go(connections: Connections) -> None:
    shapes = (2, 3), (), (0, 4), (5,)
    dtypes = torch.float64, torch.int64, torch.float32, torch.bfloat16
    values = [torch.ones(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    slices = [slice_of(number, *shape, dtype=dtypes[number]) for number, shape in enumerate(shapes)]
    ask(connections[0], CreateSlices(tuple(slices)), *values)
    answer, pulled = ask(connections[0], Pull((3, 0, 1, 2)))
    assert answer.version == 1
    assert [(each.dtype, tuple(each.shape)) for each in pulled] == [
        (dtypes[number], shapes[number]) for number in (3, 0, 1, 2)
    ]
    assert all(bool((each == 1).all()) for each in pulled)


def a_push_brings_new_values_and_known_ones_are_not_sent(connections: Connections) -> None:
    create(connections[0], slice_of(1, 2), slice_of(2, 3))
    answer, values = ask(connections[0], push_of(1, pull=(1,)), torch.tensor([1.0, 2.0]).double())
    assert (answer.version, [each.tolist() for each in values]) == (2, [[-1, -2]])
    assert ask(connections[0], Pull((1,), unless=2)) == (ServerAnswer(2), [])


def tensors_may_be_used_again_at_once(connections: Connections) -> None:
    create(connections[0], slice_of(1, 2))
    gradient = torch.ones(2).double()
    asked = connections[0].ask(push_of(1), [gradient])
    gradient.fill_(100)
    asked.answer(LIMIT_S)
    assert ask(connections[0], Pull((1,)))[1][0].tolist() == [-1, -1]


def sizes_change_from_request_to_request(connections: Connections) -> None:
    for number, size in enumerate([3, 300_000, 1, 40_000, 300_001]):
        ask(connections[0], CreateSlices((slice_of(number, size),)), torch.full((size,), float(number)).double())
        assert ask(connections[0], Pull((number,)))[1][0].tolist() == [number] * size


def many_slices(connections: Connections) -> None:
    numbers = tuple(range(1_200))
    values = [torch.full((1,), float(number)).double() for number in numbers]
    ask(connections[0], CreateSlices(tuple(slice_of(number, 1) for number in numbers)), *values)
    assert [each.item() for each in ask(connections[0], Pull(numbers))[1]] == list(numbers)


def errors_come_as_they_are_and_nothing_else_is_lost(connections: Connections) -> None:
    create(connections[0], slice_of(1, 2))
    with pytest.raises(rd.InvalidArgumentError, match="not number 7"):
        ask(connections[0], Pull((7,)))
    assert ask(connections[0], Pull((1,)))[1][0].tolist() == [0, 0]


def some_answers_wait_for_others(connections: Connections) -> None:
    waiting, other = connections
    create(other, slice_of(1, 2))
    asked = waiting.ask(Pull((1,), sender=Sender(0, 0), at_least_step=1))
    assert ask(other, Pull((1,)))[0].version == 1
    ask(other, Assign(Sender(0, 0), PushKey(1, 0), (1,), (False,)), torch.full((2,), 5.0).double())
    finish_step(lambda request: ask(other, request)[0])
    answer, (value,) = asked.answer(LIMIT_S)
    assert (answer.version, answer.step, value.tolist()) == (3, 1, [5, 5])


def a_wait_has_a_limit_and_the_link_lives_on(connections: Connections) -> None:
    waiting, other = connections
    create(other, slice_of(1, 2))
    asked = waiting.ask(Pull((), sender=Sender(0, 0), at_least_step=1))
    with pytest.raises(rd.DeadlineExceededError, match=r"parameter server 0.* within 0.05 s"):
        asked.answer(0.05)
    finish_step(lambda request: ask(other, request)[0])
    assert ask(waiting, Statistics())[0].value.steps == 1


def pushes_of_several_are_all_applied(connections: Connections) -> None:
    create(connections[0], slice_of(1, 4))

    def push(connection: ServerConnection, worker: int) -> None:
        gradient = torch.full((4,), 1.0 + worker).double()
        for number in range(50):
            _, (value,) = ask(connection, push_of(1, worker, 2 * number + worker, pull=(1,)), gradient)
            assert len(set(value.tolist())) == 1, "half of an update"
            assert value[0] <= -(number + 1) * (1 + worker), "its own push is in what it reads"

    with ThreadPoolExecutor(2) as pool:
        for begun in [pool.submit(push, each, worker) for worker, each in enumerate(connections)]:
            begun.result(LIMIT_S)
    assert ask(connections[0], Pull((1,)))[1][0].tolist() == [-150] * 4


class ServerConnectionContract(ABC):
    """Derive from it, and make connections to one `ParameterServer` with `SyncWithBackups(0)`."""

    @abstractmethod
    @contextmanager
    def connections(self, count: int) -> Iterator[list[ServerConnection]]:
        """Yield connections to one server without slices."""
        yield []

    def test_contract(self) -> None:
        for check in (
            values_come_and_go,
            a_push_brings_new_values_and_known_ones_are_not_sent,
            tensors_may_be_used_again_at_once,
            sizes_change_from_request_to_request,
            many_slices,
            errors_come_as_they_are_and_nothing_else_is_lost,
            some_answers_wait_for_others,
            a_wait_has_a_limit_and_the_link_lives_on,
            pushes_of_several_are_all_applied,
        ):
            with self.connections(2) as connections:
                check(connections)
