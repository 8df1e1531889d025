from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from raydist.collectives import differentiable
from raydist.collectives.base import Communicator
from raydist.collectives.delegating import LimitedCommunicator, RootReducingCommunicator, RootReduction
from raydist.collectives.differentiable import all_gather, promote
from raydist.collectives.tensors import (
    check_rows,
    reduce_parts,
    stage_bytes,
    stage_reduction,
)
from raydist.core.errors import CollectiveMismatchError, DeadlineExceededError, InvalidArgumentError, SpecError
from raydist.core.values import ReduceOp
from tests.cases import case
from tests.collectives.local_group import LocalGroup
from tests.collectives.threads import run_hosted, run_ranks, run_sharing
from tests.contracts import communicator as contract

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


# --- communicators that wrap another one ------------------------------------------------------------------------------


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


# --- tensors of collectives -------------------------------------------------------------------------------------------


def test_a_view_that_shows_its_memory_otherwise_travels_as_it_shows_it() -> None:
    conjugated = torch.tensor([1 + 2j, 3 - 1j]).conj()
    for view, shown in ((conjugated, [1 - 2j, 3 + 1j]), (conjugated.imag, [-2.0, 1.0])):
        assert stage_bytes(view).carrier.view(view.dtype).tolist() == shown
        staged = stage_reduction(view, ReduceOp.SUM, 1)
        assert torch.view_as_real(staged.carrier).shape[-1] == 2 if view.is_complex() else not staged.carrier.is_neg()
        staged.deliver()
        assert view.tolist() == shown


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_is_no_plain_memory_is_refused_before_it_travels() -> None:
    dense = torch.eye(3)
    kinds = {
        "torch.sparse_coo": dense.to_sparse(),
        "meta": dense.to("meta"),
        "quantized": torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8),
    }
    for kind, tensor in kinds.items():
        with pytest.raises(InvalidArgumentError, match=rf"got a {kind} one of torch.\w+ \(3, 3\)"):
            stage_bytes(tensor)
        with pytest.raises(InvalidArgumentError, match="Convert"):
            stage_reduction(tensor, ReduceOp.SUM, 2)


def test_rows_that_do_not_fit() -> None:
    mine = torch.ones(2, 3)
    check_rows([mine, torch.ones(0, 3)], mine, rank=0, world_size=2)
    wrong = {
        "one too few": [mine],
        "other columns": [mine, torch.ones(2, 4)],
        "not my length": [torch.ones(1, 3), torch.ones(5, 3)],
        "other dtype": [mine, torch.ones(5, 3, dtype=torch.int64)],
        "no rows": [mine, torch.tensor(1.0)],
    }
    for name, outputs in wrong.items():
        with case(name), pytest.raises(InvalidArgumentError, match=r"2 tensors of torch.float32 \(any, 3\)"):
            check_rows(outputs, mine, rank=0, world_size=2)


def test_halves_are_rounded_once() -> None:
    for dtype, op in ((torch.float16, ReduceOp.SUM), (torch.bfloat16, ReduceOp.MEAN)):
        parts = [torch.randn(70_000, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in range(7)]
        exact = torch.stack(parts).double().sum(0) / (7 if op is ReduceOp.MEAN else 1)
        reduce_parts(parts, parts[0], op)
        # Twice rounded (to float32 first) is off in rare ties.
        assert (parts[0] != exact.to(dtype)).float().mean() < 1e-3, (dtype, op)
    out = torch.empty(2, dtype=torch.bfloat16)
    reduce_parts([torch.tensor([value, -value], dtype=torch.bfloat16) for value in (1.0, 3.0, 2.0)], out, ReduceOp.MAX)
    assert out.tolist() == [3.0, -1.0]
