"""Ranks that share memory and call different things: an error on each of them, and the group goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from raydist.collectives.base import Communicator
from raydist.errors import CollectiveMismatchError
from raydist.values import ReduceOp
from tests.collectives.shared_memory.operations import LARGE
from tests.collectives.shared_memory.ranks import run_sharing
from tests.collectives.shared_memory.test_communicator import reduce_one

pytestmark = pytest.mark.timeout(180)


def ones(rank: int) -> torch.Tensor:
    """More of them on rank 1."""
    return torch.ones(2 + rank)


def many(rank: int) -> torch.Tensor:
    return torch.ones(LARGE + rank)


MISMATCHES: dict[str, Callable[[Communicator, int], object]] = {
    "shape": lambda c, rank: c.all_reduce(torch.ones(2 + rank), ReduceOp.SUM),
    "shape of as many elements": lambda c, rank: c.all_reduce(torch.ones((2, 3) if rank else (3, 2)), ReduceOp.SUM),
    "shape of a large one": lambda c, rank: c.all_reduce(torch.ones(LARGE + rank), ReduceOp.SUM),
    "large and small": lambda c, rank: c.broadcast(torch.ones(LARGE if rank else 1), 0),
    "shape of gathered parts": lambda c, rank: c.all_gather([ones(rank), ones(rank)], ones(rank)),
    "shape of large gathered parts": lambda c, rank: c.all_gather([many(rank), many(rank)], many(rank)),
    "large and small parts": lambda c, rank: c.all_gather([(ones, many)[rank](0)] * 2, (ones, many)[rank](0)),
    "dtype": lambda c, rank: c.broadcast(torch.ones(2, dtype=(torch.int32, torch.float32)[rank]), 0),
    "op": lambda c, rank: c.all_reduce(torch.ones(2), (ReduceOp.MIN, ReduceOp.MAX)[rank]),
    "root": lambda c, rank: c.broadcast(torch.ones(2), rank),
    "collective": lambda c, rank: c.barrier() if rank else c.all_reduce(torch.ones(1), ReduceOp.SUM),
    "memory": lambda c, rank: c.allocate([(LARGE + rank, torch.float32)]),
    "long shapes": lambda c, rank: c.all_reduce(torch.ones((1,) * 63 + (1 + rank,)), ReduceOp.SUM),
}


@pytest.mark.parametrize("call", MISMATCHES.values(), ids=MISMATCHES)
def test_a_mismatch_is_an_error_on_every_rank_and_the_group_goes_on(call: Callable[[Communicator, int], Any]) -> None:
    def body(communicator: Communicator) -> tuple[str, float]:
        assert communicator.checks_itself
        with pytest.raises(CollectiveMismatchError) as caught:
            call(communicator, communicator.rank).wait()
        return str(caught.value), reduce_one(communicator)

    (first, second), (other, _) = run_sharing(2, body)
    assert second == 2.0
    assert first == other
    assert "rank 0: " in first
    assert "rank 1: " in first


def test_a_mismatch_shows_what_each_rank_called() -> None:
    def body(communicator: Communicator) -> str:
        reduce_one(communicator)
        with pytest.raises(CollectiveMismatchError) as caught:
            communicator.all_reduce(torch.ones(2 + communicator.rank), ReduceOp.SUM).wait()
        return str(caught.value)

    assert run_sharing(2, body)[0] == (
        "All replicas must call the same collectives with equal shapes and dtypes, got "
        "rank 0: all_reduce(SUM) of torch.float32 (2,) as call 1; "
        "rank 1: all_reduce(SUM) of torch.float32 (3,) as call 1. Look for a branch that only some replicas take."
    )


def test_collectives_in_another_order() -> None:
    def body(communicator: Communicator) -> list[str]:
        tensors = [torch.ones(3), torch.ones(4)]
        order = (0, 1) if communicator.rank else (1, 0)
        works = [communicator.all_reduce(tensors[k], ReduceOp.SUM) for k in order]
        messages = []
        for work in works:
            with pytest.raises(CollectiveMismatchError) as caught:
                work.wait()
            messages.append(str(caught.value))
        return messages

    first, second = run_sharing(2, body)[0]
    assert "(4,) as call 0; rank 1: all_reduce(SUM) of torch.float32 (3,) as call 0" in first
    assert "(3,) as call 1; rank 1: all_reduce(SUM) of torch.float32 (4,) as call 1" in second
