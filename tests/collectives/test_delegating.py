"""Communicators that wrap another one: with another limit, and reducing on one rank."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from raydist.collectives.delegating import LimitedCommunicator, RootReducingCommunicator, RootReduction
from raydist.core.errors import DeadlineExceededError, SpecError
from raydist.core.values import ReduceOp
from tests.collectives.local_group import LocalGroup
from tests.collectives.threads import run_ranks
from tests.contracts import communicator as contract


def test_a_call_ends_at_its_own_limit_and_others_at_theirs() -> None:
    late = threading.Event()

    def body(group: LocalGroup) -> float:
        limited = LimitedCommunicator(group, 0.2)
        assert limited.timeout_s == 0.2
        tensor = torch.ones(2)
        limited.all_reduce(tensor, ReduceOp.SUM).wait()
        assert tensor.tolist() == [2.0, 2.0]
        began = time.monotonic()
        if group.rank == 0:
            with pytest.raises(DeadlineExceededError):
                limited.all_reduce(torch.ones(2), ReduceOp.SUM).wait()
            late.set()
        else:
            late.wait(10)
        return time.monotonic() - began

    assert max(run_ranks(2, body)) < 10


def wrapped(group: LocalGroup) -> RootReducingCommunicator:
    return RootReducingCommunicator(group, RootReduction(1))


def test_it_reduces_and_moves_as_any_other() -> None:
    results = run_ranks(3, lambda group: contract.reduce_everything(wrapped(group)))
    for (op, dtype), everywhere in zip(contract.CASES, results[0], strict=True):
        expected = contract.reduced(op, dtype, 3)
        assert everywhere == pytest.approx(expected, rel=1e-2), f"{op} {dtype}"
    assert run_ranks(3, lambda group: contract.several_at_once(wrapped(group))) == [[3.0, 6.0, 9.0, 12.0]] * 3
    run_ranks(3, lambda group: contract.collect_rows(wrapped(group)))


def test_a_reduction_under_way_ends_before_the_next_call_on_every_rank() -> None:
    def body(group: LocalGroup) -> float:
        communicator, tensor = wrapped(group), torch.ones(1)
        work = communicator.all_reduce(tensor, ReduceOp.SUM)
        if group.rank == 0:
            work.wait()
        communicator.broadcast(torch.ones(1), 0).wait()
        work.wait()
        return tensor.item()

    assert run_ranks(2, body) == [2.0, 2.0]


def test_a_function_of_ones_own_adds_up_in_the_order_of_ranks() -> None:
    seen: list[list[float]] = []

    def note(tensors: object) -> torch.Tensor:
        assert isinstance(tensors, list)
        seen.append([tensor.item() for tensor in tensors])
        return torch.stack(tensors).sum(0)

    brought = [1e8, -1e8, 1.0]  # in float32 only this order gives 1

    def body(group: LocalGroup) -> tuple[float, ...]:
        total, mean, most = (torch.tensor([float(value)]) for value in (brought[group.rank], group.rank, group.rank))
        RootReducingCommunicator(group, RootReduction(2)).all_reduce(total, ReduceOp.SUM).wait()
        communicator = RootReducingCommunicator(group, RootReduction(1, note))
        communicator.all_reduce(mean, ReduceOp.MEAN).wait()
        communicator.all_reduce(most, ReduceOp.MAX).wait()
        return total.item(), mean.item(), most.item()

    assert run_ranks(3, body) == [(1.0, 1.0, 2.0)] * 3
    assert seen == [[0.0, 1.0, 2.0]]

    def wrong(group: LocalGroup) -> None:
        with pytest.raises(SpecError, match="accumulation_fn must return one tensor"):
            RootReducingCommunicator(group, RootReduction(0, lambda tensors: torch.stack(list(tensors)))).all_reduce(
                torch.ones(3), ReduceOp.SUM
            ).wait()

    run_ranks(1, wrong)
