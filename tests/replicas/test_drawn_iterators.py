"""Iterators among a step's arguments; saves and preemption at their draws are tested by tests/checkpoints/loops."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from raydist.actors.readers.replica_iterator import ReplicaIterator
from raydist.checkpoints.loop_commands import LoopCommand
from raydist.checkpoints.replica_loop import ReplicaLoops
from raydist.checkpoints.shards import ShardWriter
from raydist.core.errors import FailedPreconditionError
from raydist.dataset import Dataset
from raydist.distributed_dataset import distribute
from raydist.mirroring.messages import StepPayload
from raydist.options import InputOptions
from raydist.replicas.device_copies import Accelerator, DeviceCopies
from raydist.replicas.function_calls import FunctionCalls
from raydist.replicas.step import StepHeader
from tests.actors.readers.fakes import fake_side

_HEADER = StepHeader(7, 0, mock.create_autospec(StepPayload, instance=True))


@pytest.fixture
def iterators() -> Iterator[list[ReplicaIterator]]:
    """Two passes over five rows in batches of two, as replica 1 of 2 gets them."""
    with fake_side(2) as side:
        dataset = distribute(Dataset.range(5).batch(2), side, InputOptions(num_input_workers=0))
        sent: list[Any] = [iter(dataset).__reduce__() for _ in range(2)]
        yield [make(*args) for make, args in sent]


@pytest.fixture
def peers() -> Any:
    return mock.Mock(rank=1, loop=None)


def draws(loops: ReplicaLoops | None = None) -> FunctionCalls:
    writer = mock.create_autospec(ShardWriter, instance=True)
    loops = loops or ReplicaLoops(writer)
    cpu = Accelerator("cpu")
    return FunctionCalls(mock.Mock(), writer, loops, DeviceCopies(cpu.device), cpu, 1.0)


def test_they_draw_this_replicas_pieces_and_tell_everybodys_rows(iterators: list[ReplicaIterator], peers: Any) -> None:
    with draws().bound(((iterators[0],), {"other": {"nested": iterators[1]}}), _HEADER, peers):
        assert next(iterators[0]).tolist() == [1]
        assert next(iterators[1]).tolist() == [1]
    assert [call.args for call in peers.next_batch.call_args_list] == [((1, 1),), ((1, 1),)]


@pytest.mark.parametrize(("padding", "rows"), [(True, [4]), (False, [])])
def test_where_there_are_no_rows_the_header_says_what_is_drawn(
    padding: bool, rows: list[int], iterators: list[ReplicaIterator], peers: Any
) -> None:
    header = StepHeader(7, 0, _HEADER.payload, padding=padding)
    with draws().bound(iterators[0], header, peers):
        assert [batch.tolist() for batch in iterators[0]] == [[1], [3], rows]


def test_they_are_let_go_of_whatever_happens(iterators: list[ReplicaIterator], peers: Any) -> None:
    with contextlib.suppress(KeyError), draws().bound(tuple(iterators), _HEADER, peers):
        assert [next(iterator).tolist() for iterator in iterators] == [[1], [1]]
        raise KeyError("of the step")
    for iterator in iterators:
        with pytest.raises(FailedPreconditionError):
            next(iterator)


def test_a_run_whose_draws_are_boundaries_is_known_while_it_goes_on(
    iterators: list[ReplicaIterator], peers: Any
) -> None:
    loops = ReplicaLoops(mock.create_autospec(ShardWriter, instance=True))
    header = StepHeader(7, 0, _HEADER.payload, loop=LoopCommand((), 5.0))
    with draws(loops).bound(tuple(iterators), header, peers):
        assert peers.loop is not None
        assert loops.hold(7) == 0
    assert peers.loop is None
    assert loops.hold(7) is None


@pytest.mark.parametrize("arguments", [(1, "text"), ()])
def test_a_step_that_draws_from_none_is_no_loop(arguments: Any, peers: Any) -> None:
    loops = ReplicaLoops(mock.create_autospec(ShardWriter, instance=True))
    with draws(loops).bound(arguments, StepHeader(7, 0, _HEADER.payload, loop=LoopCommand((), 5.0)), peers):
        assert peers.loop is None
    assert loops.news(7) is None
