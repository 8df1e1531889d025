from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from raydist.collectives import differentiable
from raydist.collectives.base import Communicator
from raydist.collectives.differentiable import all_gather, promote
from raydist.core.errors import CollectiveMismatchError, InvalidArgumentError
from raydist.core.values import ReduceOp
from tests.cases import case
from tests.collectives.local_group import LocalGroup
from tests.collectives.threads import run_hosted, run_ranks, run_sharing

LENGTHS = (3, 1, 2)
WEIGHTS = (0.5, 1 / 6, 1 / 3)
ONE = torch.ones(1)


def part(rank: int) -> torch.Tensor:
    """Rank's rows; the whole of them is what a single process would have."""
    return torch.arange(2.0 * LENGTHS[rank], dtype=torch.float64).reshape(LENGTHS[rank], 2) + rank + 1


def all_reduce(
    group: Communicator, value: torch.Tensor | float, name: str, weights: tuple[float, ...] | None = None
) -> torch.Tensor:
    op = ReduceOp(name)
    return differentiable.all_reduce(group, promote(torch.as_tensor(value), op), op, weights)


def test_all_reduce_of_numbers() -> None:
    expected = {"SUM": 6.0, "MEAN": 2.0, "MIN": 1.0, "MAX": 3.0, "PRODUCT": 6.0}

    def body(group: LocalGroup) -> dict[str, torch.Tensor]:
        counted = all_reduce(group, torch.tensor([True, group.rank == 0]), "SUM")
        assert counted.tolist() == [3, 1]
        return {op: all_reduce(group, group.rank + 1, op) for op in expected}

    for results in run_ranks(3, body):
        assert {op: result.item() for op, result in results.items()} == expected
        for op, result in results.items():
            assert result.dtype == (torch.float32 if op == "MEAN" else torch.int64), op
            assert not result.requires_grad, op


def test_all_gather_of_ragged_rows() -> None:
    for result in run_ranks(3, lambda group: all_gather(group, part(group.rank))):
        torch.testing.assert_close(result, torch.cat([part(rank) for rank in range(3)]))
    for result in run_ranks(3, lambda group: all_gather(group, part(group.rank).t().bool(), axis=-1)):
        torch.testing.assert_close(result, torch.cat([part(rank) for rank in range(3)]).t().bool())


def global_objective(
    together: Callable[[list[torch.Tensor]], torch.Tensor], weights: tuple[float, ...]
) -> list[torch.Tensor]:
    """Gradients of sum_j w_j L_j by plain autograd on all parts at once, over each part's own weight."""
    parts = [part(rank).requires_grad_() for rank in range(3)]
    shared = together(parts)
    total = sum((w * own_loss(shared, parts[rank], rank) for rank, w in enumerate(weights)), torch.zeros(()))
    gradients = torch.autograd.grad(total, parts)
    return [gradient / w if w else gradient * 0 for gradient, w in zip(gradients, weights, strict=True)]


def own_loss(shared: torch.Tensor, own: torch.Tensor, rank: int) -> torch.Tensor:
    """A loss that differs between ranks and depends on the shared value and on the rank's own rows."""
    return (shared.sin() * (rank + 1)).sum() + (own * shared.mean()).sum()


REDUCTIONS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "SUM": torch.sum,
    "MEAN": torch.mean,
    "MIN": torch.amin,
    "MAX": torch.amax,
    "PRODUCT": torch.prod,
}


@pytest.mark.parametrize("weights", [WEIGHTS, None, (0.75, 0.25, 0.0)], ids=["mean", "sum", "an empty replica"])
def test_derivatives(weights: tuple[float, ...] | None) -> None:
    def body(group: LocalGroup) -> list[torch.Tensor]:
        found = []
        for op in (*REDUCTIONS, None):
            rows = part(group.rank).requires_grad_()
            shared = all_gather(group, rows, 0, weights) if op is None else all_reduce(group, rows.sum(0), op, weights)
            own_loss(shared, rows, group.rank).backward()
            assert rows.grad is not None
            found.append(rows.grad)
        return found

    def together(op: str | None) -> Callable[[list[torch.Tensor]], torch.Tensor]:
        if op is None:
            return torch.cat
        return lambda parts: REDUCTIONS[op](torch.stack([rows.sum(0) for rows in parts]), 0)

    results = run_ranks(3, body)
    for number, op in enumerate((*REDUCTIONS, None)):
        expected = global_objective(together(op), weights or (1.0, 1.0, 1.0))
        for rank in range(3):
            if weights is None or weights[rank]:
                with case(f"{op or 'all_gather'} on rank {rank}"):
                    torch.testing.assert_close(results[rank][number], expected[rank], rtol=1e-12, atol=1e-14)


def test_nan_of_an_empty_replica_stays_there_and_one_with_a_constant_serves_the_others() -> None:
    def body(group: LocalGroup) -> list[list[float] | None]:
        value = torch.ones(2, requires_grad=True)
        result = all_reduce(group, value, "SUM", (1.0, 0.0))
        (result * (torch.nan if group.rank == 1 else 1.0)).sum().backward()
        other = torch.ones(2, requires_grad=group.rank == 0)
        all_reduce(group, other, "SUM", (0.5, 0.5)).sum().backward()
        return [None if each.grad is None else each.grad.tolist() for each in (value, other)]

    assert run_ranks(2, body) == [[[1.0, 1.0], [2.0, 2.0]], [[0.0, 0.0], None]]


def test_what_does_not_fit_is_an_error_everywhere() -> None:
    calls: dict[str, Callable[[Communicator], torch.Tensor]] = {
        r"torch.int64.*torch.float32": lambda group: all_reduce(group, 1.0 if group.rank else 1, "SUM"),
        "all_reduce.*all_gather": lambda group: all_gather(group, ONE) if group.rank else all_reduce(group, ONE, "SUM"),
        r"\(2, 3\).*\(2, 4\)": lambda group: all_gather(group, torch.ones(2, 3 + group.rank)),
    }

    def body(group: LocalGroup) -> None:
        for expected, call in calls.items():
            with pytest.raises(CollectiveMismatchError, match="rank 0: .*rank 1: ") as caught:
                call(group)
            assert caught.match(expected)
        with pytest.raises(InvalidArgumentError, match=r"reshape\(1\)"):
            all_gather(group, torch.tensor(1.0))

    run_ranks(2, body)


@pytest.mark.parametrize("run", [run_sharing, lambda _, body: run_hosted("aab", body)], ids=["one host", "two hosts"])
def test_one_replica_s_derivative_is_known_to_all(run: Callable[..., object]) -> None:
    def body(group: Communicator) -> tuple[float, float, bool]:
        value = torch.full((3, 2), group.rank + 1.0, requires_grad=group.rank == 1)
        total = all_reduce(group, value, "SUM")
        differentiable = total.requires_grad
        again = all_reduce(group, value.detach(), "MEAN")
        assert not again.requires_grad
        gradient = 0.0
        if differentiable:
            (total.sum() * (group.rank + 1)).backward()
            gradient = float(value.grad[0, 0]) if value.grad is not None else 0.0
        return float(total.detach()[0, 0]), gradient, differentiable

    assert run(3, body) == [(6.0, 0.0, True), (6.0, 6.0, True), (6.0, 0.0, True)]
