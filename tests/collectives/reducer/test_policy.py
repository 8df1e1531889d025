"""NaN and infinite gradients: passed, raised, or skipped with the optimizer's step."""

from __future__ import annotations

import _thread
import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from raydist.collectives.reducer.nonfinite import NonfinitePolicy, OnNonfinite, SkippedUpdates, fault_of, is_finite
from raydist.collectives.reducer.reducer import GradientReducer
from raydist.core.errors import FailedPreconditionError
from tests.collectives.local_group import LocalGroup
from tests.collectives.threads import run_ranks

NAN, INF = float("nan"), float("inf")
Body = Callable[[nn.Module, GradientReducer, NonfinitePolicy, int], Any]


def names(parameters: Iterable[torch.nn.Parameter]) -> Sequence[str]:
    return [f"p{parameter.numel()}" for parameter in parameters]


def on_three(start: nn.Module, choice: OnNonfinite, body: Body) -> list[Any]:
    """Run a body on three replicas of a model, each with a reducer in small buckets, in one run with `choice`."""
    replicas = [copy.deepcopy(start) for _ in range(3)]

    def main(group: LocalGroup) -> Any:
        policy = NonfinitePolicy(names)
        reducer = GradientReducer(group, bucket_bytes=64, first_bucket_bytes=32, policy=policy)
        reducer.attach(tuple(replicas[group.rank].parameters()))
        with policy.run(choice):
            return body(replicas[group.rank], reducer, policy, group.rank)

    return run_ranks(3, main)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def backward(model: nn.Module, reducer: GradientReducer, factor: float) -> None:
    with reducer.step(weight=1 / 3):
        (model(torch.ones(1, 3)).sum() * factor).backward()


def test_one_bad_number_is_found_and_a_sum_that_overflows_is_none() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64):
        values = torch.full((100,), 1.0, dtype=dtype)
        assert is_finite(values), dtype
        for bad in (NAN, INF, -INF):
            spoilt = values.clone()
            spoilt[77] = bad
            assert not is_finite(spoilt), (dtype, bad)
        assert not is_finite(torch.tensor([INF, -INF], dtype=dtype)), dtype
        if dtype.is_floating_point:
            assert is_finite(torch.full((10,), torch.finfo(dtype).max, dtype=dtype)), dtype
    assert is_finite(torch.zeros(0))
    assert [fault_of(torch.tensor([1.0, bad])) for bad in (2.0, INF, NAN)] == [0, 1, 2]
    assert fault_of(torch.tensor([-INF, NAN])) == 3
    indices = torch.tensor([[1, 1]])
    assert fault_of(torch.sparse_coo_tensor(indices, torch.tensor([1.0, NAN]), (4,), check_invariants=True)) == 2


@pytest.mark.parametrize("factor", [NAN, INF])
def test_raise_names_replica_parameter_and_kind_on_all_alike(factor: float) -> None:
    def body(model: nn.Module, reducer: GradientReducer, policy: NonfinitePolicy, rank: int) -> str:
        backward(model, reducer, 1.0)
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        with pytest.raises(FailedPreconditionError, match="must be finite") as caught:
            backward(model, reducer, factor if rank == 1 else 1.0)
        # What was there before is there again.
        torch.testing.assert_close([p.grad for p in model.parameters()], before, rtol=0, atol=0)
        backward(model, reducer, 1.0)
        return str(caught.value)

    said = on_three(two_layers(), "raise", body)
    assert len(set(said)) == 1
    assert "replica 1: p12" in said[0]
    assert "replica 0" not in said[0]
    assert "backward pass 1 of batch 1" in said[0]
    assert ("NaN" if factor != factor else "infinite") in said[0]
    assert 'on_nonfinite="skip"' in said[0]


def test_raise_says_so_where_only_the_sum_is_too_large() -> None:
    def body(model: nn.Module, reducer: GradientReducer, policy: NonfinitePolicy, rank: int) -> None:
        weight = next(model.parameters())
        with reducer.step(weight=1.0), pytest.raises(FailedPreconditionError, match="no replica's own"):
            (weight * 3e38).sum().backward()

    on_three(nn.Linear(2, 1, bias=False), "raise", body)


def test_every_optimizer_skips_until_the_next_pass_and_some_until_their_gradients_are_gone() -> None:
    def body(model: nn.Module, reducer: GradientReducer, policy: NonfinitePolicy, rank: int) -> list[list[bool]]:
        first, second = (layer for layer in model.children() if isinstance(layer, nn.Linear))
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (first, second)]
        moved = []

        def step_all() -> None:
            before = [layer.weight.clone() for layer in (first, second)]
            for optimizer in optimizers:
                optimizer.step()
            after = zip((first, second), before, strict=True)
            moved.append([not torch.equal(layer.weight, then) for layer, then in after])

        def one(layer: nn.Linear, factor: float) -> None:
            with reducer.step(weight=1 / 3):
                (layer(torch.ones(1, layer.in_features)).sum() * factor).backward()

        one(first, NAN if rank == 0 else 1.0)
        step_all()
        one(second, 1.0)  # the first layer's NaN is still there
        step_all()
        model.zero_grad()
        one(second, 1.0)
        step_all()
        one(first, NAN if rank == 0 else 1.0)
        model.zero_grad()
        one(first, 1.0)
        step_all()
        assert (policy.num_found, policy.num_skipped) == (2, 3)
        return moved

    nobody, second, first = [False, False], [False, True], [True, False]
    assert on_three(two_layers(), "skip", body) == [[nobody, second, second, first]] * 3


def test_a_bad_pass_under_no_sync_counts_with_the_next_one() -> None:
    def body(model: nn.Module, reducer: GradientReducer, policy: NonfinitePolicy, rank: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = copy.deepcopy(model.state_dict())
        with reducer.no_sync():
            backward(model, reducer, NAN if rank == 1 else 1.0)
        assert policy.num_found == 0
        backward(model, reducer, 1.0)
        optimizer.step()
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        assert (policy.num_found, policy.num_skipped) == (1, 1)

    on_three(two_layers(), "skip", body)


def test_sparse_gradients_are_looked_at_too_but_not_those_of_a_replica_that_counts_nothing() -> None:
    def body(model: nn.Module, reducer: GradientReducer, policy: NonfinitePolicy, rank: int) -> str:
        def backward() -> None:
            (model(torch.tensor([rank, 4])).sum() * (NAN if rank == 2 else 1.0)).backward()

        with reducer.step(weight=0.0 if rank == 2 else 0.5, empty=rank == 2):
            backward()
        with reducer.step(weight=1 / 3), pytest.raises(FailedPreconditionError) as caught:
            backward()
        return str(caught.value)

    said = on_three(nn.Embedding(6, 2, sparse=True), "raise", body)
    assert "replica 2: p12 (NaN)" in said[0]
    assert len(set(said)) == 1


def test_optimizers_that_step_in_backward_are_skipped_too() -> None:
    def body(model: nn.Module, reducer: GradientReducer, policy: NonfinitePolicy, rank: int) -> None:
        def step(parameter: torch.Tensor) -> None:
            optimizers[id(parameter)].step()
            optimizers[id(parameter)].zero_grad()

        optimizers = {id(p): torch.optim.Adam([p], lr=0.1) for p in model.parameters()}
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        before = copy.deepcopy(model.state_dict())
        backward(model, reducer, INF if rank == 0 else 1.0)
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        assert policy.num_skipped == 4
        backward(model, reducer, 1.0)
        assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])

    on_three(two_layers(), "skip", body)


class Twice(torch.optim.Optimizer):
    """Calls its closure twice a step."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        closure()
        loss = closure()
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.data.sub_(parameter.grad)
        return loss


def test_closures_are_asked_after_they_ran() -> None:
    layer = nn.Linear(2, 1)
    bad = [False]
    skipped = SkippedUpdates(lambda _: bad[0])
    kinds = [(torch.optim.SGD, "position"), (torch.optim.SGD, "name"), (torch.optim.LBFGS, "position")]
    for make, given in (*kinds, (Twice, "position")):
        optimizer: Any = make(layer.parameters(), lr=0.1)
        for now in (False, True):
            before = layer.weight.detach().clone()
            bad[0] = False

            def closure(now: bool = now, optimizer: Any = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = layer(torch.ones(1, 2)).square().sum()
                loss.backward()
                bad[0] = now
                return loss

            with skipped.watch():
                loss = optimizer.step(closure) if given == "position" else optimizer.step(closure=closure)
            assert isinstance(loss, torch.Tensor)
            assert torch.equal(before, layer.weight) is now
            assert layer.weight.grad is not None
    assert skipped.count == 4


@pytest.mark.parametrize("ours", [True, False])
def test_only_the_thread_that_watches_skips_and_threads_of_the_engine(ours: bool) -> None:
    """On a GPU torch calls hooks on parameters from a thread of its own, which Python has not started."""
    layer = nn.Linear(2, 1)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    before, gradient = layer.weight.detach().clone(), layer.weight.grad
    ended = threading.Event()

    def step() -> None:
        optimizer.step()
        ended.set()

    with SkippedUpdates(lambda _: True).watch():
        if ours:
            threading.Thread(target=step).start()
        else:
            _thread.start_new_thread(step, ())
        assert ended.wait(10)
    assert torch.equal(layer.weight, before) is not ours
    assert layer.weight.grad is gradient
    assert bool(optimizer.state) is ours
