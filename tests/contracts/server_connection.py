"""The contract of every connection to a parameter server."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import raydist as rd
from raydist.parameter_servers.connection import ServerConnection
from raydist.parameter_servers.requests import (
    Arrive,
    Assign,
    CreateSlices,
    Finish,
    Pull,
    Push,
    PushKey,
    Sender,
    ServerAnswer,
    ServerRequest,
    Statistics,
)
from tests.parameter_servers.examples import slice_of

LIMIT_S = 20.0
ME = Sender(0, 0)


def ask(
    connection: ServerConnection, request: ServerRequest, *tensors: torch.Tensor
) -> tuple[ServerAnswer, list[torch.Tensor]]:
    answer, values = connection.ask(request, tensors).answer(LIMIT_S)
    return answer, [value.clone() for value in values]


def key(index: int = 0) -> PushKey:
    return PushKey(1, index)


class ServerConnectionContract(ABC):
    """Derive from it, and make connections to one `PlainServer`."""

    @abstractmethod
    @contextmanager
    def connections(self, count: int) -> Iterator[list[ServerConnection]]:
        """Yield connections to one server without slices."""
        yield []

    def test_values_come_and_go(self) -> None:
        with self.connections(1) as (connection,):
            shapes = (2, 3), (), (0, 4), (5,)
            dtypes = torch.float64, torch.int64, torch.float32, torch.bfloat16
            values = [torch.ones(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
            slices = [slice_of(number, *shape, dtype=dtypes[number]) for number, shape in enumerate(shapes)]
            ask(connection, CreateSlices(tuple(slices)), *values)
            answer, pulled = ask(connection, Pull((3, 0, 1, 2)))
            assert answer.version == 1
            assert [(each.dtype, tuple(each.shape)) for each in pulled] == [
                (dtypes[number], shapes[number]) for number in (3, 0, 1, 2)
            ]
            assert all(bool((each == 1).all()) for each in pulled)

    def test_a_push_brings_new_values_and_known_ones_are_not_sent(self) -> None:
        with self.connections(1) as (connection,):
            slices = slice_of(1, 2), slice_of(2, 3)
            ask(connection, CreateSlices(slices), torch.ones(2).double(), torch.ones(3).double())
            push = Push(ME, key(), 0, (1,), ("dense",), pull=(1,))
            answer, values = ask(connection, push, torch.tensor([1.0, 2.0]).double())
            assert (answer.version, [each.tolist() for each in values]) == (2, [[0, -1]])
            assert ask(connection, Pull((1,), unless=2)) == (ServerAnswer(2), [])

    def test_tensors_may_be_used_again_at_once(self) -> None:
        with self.connections(1) as (connection,):
            ask(connection, CreateSlices((slice_of(1, 2),)), torch.zeros(2).double())
            gradient = torch.ones(2).double()
            asked = connection.ask(Push(ME, key(), 0, (1,), ("dense",)), [gradient])
            gradient.fill_(100)
            asked.answer(LIMIT_S)
            assert ask(connection, Pull((1,)))[1][0].tolist() == [-1, -1]

    def test_sizes_change_from_request_to_request(self) -> None:
        with self.connections(1) as (connection,):
            for number, size in enumerate([3, 300_000, 1, 40_000, 300_001]):
                ask(connection, CreateSlices((slice_of(number, size),)), torch.full((size,), float(number)).double())
                assert ask(connection, Pull((number,)))[1][0].tolist() == [number] * size

    def test_many_slices(self) -> None:
        with self.connections(1) as (connection,):
            slices = tuple(slice_of(number, 1) for number in range(1_200))
            values = [torch.full((1,), float(number)).double() for number in range(1_200)]
            ask(connection, CreateSlices(slices), *values)
            numbers = tuple(range(1_200))
            assert [each.item() for each in ask(connection, Pull(numbers))[1]] == list(numbers)

    def test_errors_come_as_they_are_and_nothing_else_is_lost(self) -> None:
        with self.connections(1) as (connection,):
            with pytest.raises(rd.InvalidArgumentError, match="must be asked plain things, got Arrive"):
                ask(connection, Arrive(ME, key(), 0))
            assert ask(connection, Statistics())[0].value["Arrive"] == 1

    def test_some_answers_wait_for_others(self) -> None:
        with self.connections(2) as (waiting, other):
            ask(other, CreateSlices((slice_of(1, 2),)), torch.zeros(2).double())
            asked = waiting.ask(Pull((1,), sender=ME, at_least_step=1))
            assert ask(other, Pull((1,)))[0].version == 1
            ask(other, Assign(ME, key(), (1,), (False,)), torch.full((2,), 5.0).double())
            ask(other, Finish())
            answer, (value,) = asked.answer(LIMIT_S)
            assert (answer.version, answer.step, value.tolist()) == (3, 1, [5, 5])

    def test_a_wait_has_a_limit_and_the_link_lives_on(self) -> None:
        with self.connections(2) as (waiting, other):
            asked = waiting.ask(Pull((), sender=ME, at_least_step=1))
            with pytest.raises(rd.DeadlineExceededError, match=r"parameter server 0.* within 0.05 s"):
                asked.answer(0.05)
            ask(other, Finish())
            assert ask(waiting, Statistics())[0].value["Finish"] == 1

    def test_pushes_of_several_are_all_applied(self) -> None:
        with self.connections(2) as connections:
            ask(connections[0], CreateSlices((slice_of(1, 4),)), torch.zeros(4).double())
            failed: list[Exception] = []

            def push(connection: ServerConnection, worker: int) -> None:
                gradient = torch.full((4,), 1.0 + worker).double()
                try:
                    for index in range(50):
                        request = Push(Sender(worker, 0), key(index), 0, (1,), ("dense",), pull=(1,))
                        _, (value,) = ask(connection, request, gradient)
                        assert len(set(value.tolist())) == 1, "half of an update"
                        assert value[0] <= -(index + 1) * (1 + worker), "its own push is in what it reads"
                except Exception as error:
                    failed.append(error)

            threads = [threading.Thread(target=push, args=(each, worker)) for worker, each in enumerate(connections)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(LIMIT_S)
            assert not failed
            assert ask(connections[0], Pull((1,)))[1][0].tolist() == [-150] * 4
