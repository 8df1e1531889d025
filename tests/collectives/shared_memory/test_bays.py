from __future__ import annotations

import pytest
import torch

from raydist.collectives.base import Communicator
from raydist.errors import CollectiveMismatchError
from raydist.values import ReduceOp
from tests.collectives.shared_memory.ranks import run_sharing

MANY = 11  # from nine on a group has bays


def values(rank: int, numel: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.arange(numel).remainder(7).add(rank + 1).to(dtype)


@pytest.mark.parametrize("op", list(ReduceOp))
@pytest.mark.parametrize("numel", [1, 300, 5000, 16_384])  # through slots, one reducer, three, eight
def test_reduces(numel: int, op: ReduceOp) -> None:
    def body(communicator: Communicator) -> torch.Tensor:
        tensor = values(communicator.rank, numel)
        communicator.all_reduce(tensor, op).wait()
        return tensor

    rows = torch.stack([values(rank, numel) for rank in range(MANY)])
    expected = {
        ReduceOp.SUM: rows.sum(0),
        ReduceOp.MEAN: rows.mean(0),
        ReduceOp.MIN: rows.amin(0),
        ReduceOp.MAX: rows.amax(0),
        ReduceOp.PRODUCT: rows.prod(0),
    }
    results = run_sharing(MANY, body)
    torch.testing.assert_close(results[0], expected[op])
    assert all(torch.equal(result, results[0]) for result in results)


def test_root_alone_gets_the_reduction() -> None:
    def body(communicator: Communicator) -> torch.Tensor:
        tensor = values(communicator.rank, 9000, torch.int32)
        communicator.reduce(tensor, 3, ReduceOp.SUM).wait()
        return tensor

    result = run_sharing(MANY, body)[3]
    rows = torch.stack([values(rank, 9000, torch.int32) for rank in range(MANY)])
    assert torch.equal(result, rows.sum(0, dtype=torch.int32))


def test_several_are_under_way_between_others() -> None:
    """More than there are bays, of different numbers of reducers, between collectives that use none."""

    def body(communicator: Communicator) -> list[float]:
        sizes = [5000, 3, 16_000, 600, 100_000, 9000, 12_000, 8, 700, 16_000]
        tensors = [torch.full((size,), float(communicator.rank + place)) for place, size in enumerate(sizes)]
        works = [communicator.all_reduce(tensor, ReduceOp.SUM) for tensor in tensors]
        for work in reversed(works):
            work.wait()
        assert all(bool((tensor == tensor[0]).all()) for tensor in tensors)
        return [float(tensor[0]) for tensor in tensors]

    total = sum(range(MANY))
    assert run_sharing(MANY, body) == [[float(total + MANY * place) for place in range(10)]] * MANY


def test_bays_are_used_again_and_again() -> None:
    def body(communicator: Communicator) -> list[float]:
        sums = []
        for step in range(20):
            tensor = torch.full((4000,), float(step))
            communicator.all_reduce(tensor, ReduceOp.SUM).wait()
            sums.append(float(tensor[step]))
        return sums

    assert run_sharing(MANY, body) == [[float(MANY * step) for step in range(20)]] * MANY


def test_ranks_that_call_different_things_are_told() -> None:
    def body(communicator: Communicator) -> str:
        tensor = torch.ones(4000 if communicator.rank else 2)
        with pytest.raises(CollectiveMismatchError, match=r"torch.float32 \(2,\).*torch.float32 \(4000,\)"):
            communicator.all_reduce(tensor, ReduceOp.SUM).wait()
        return "told"

    assert run_sharing(MANY, body) == ["told"] * MANY
