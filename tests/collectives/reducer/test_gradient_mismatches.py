"""Replicas that do not do the same are told."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from raydist.collectives.reducer.reducer import GradientReducer
from raydist.collectives.reducer.trailer import Updates
from raydist.core.errors import CollectiveMismatchError, FailedPreconditionError
from raydist.core.values import ReduceOp
from tests.collectives.gradient_steps import (
    gradients_of,
    on_two,
    plain,
)
from tests.collectives.local_group import LocalGroup
from tests.collectives.models import (
    assert_equal_parameters,
    build,
    loss_of,
    rows,
    train_alone,
    train_together,
)
from tests.collectives.threads import run_ranks


def test_changed_local_gradients_are_refused() -> None:
    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        with reducer.step(weight=0.5):
            with reducer.no_sync():
                loss_of(model, rows(2)).backward()
            for gradient in gradients_of(model):
                assert gradient is not None
                gradient.mul_(2.0)
            with pytest.raises(FailedPreconditionError, match="only be zeroed"):
                loss_of(model, rows(2)).backward()

    on_two(build("linear"), body)


def test_replicas_out_of_step_are_told() -> None:
    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        for _ in range(rank):
            with reducer.step():
                pass
        with reducer.step(), pytest.raises(CollectiveMismatchError, match=r"rank 0: step 0.*rank 1: step 1"):
            loss_of(model, rows(2)).backward()

    on_two(build("linear"), body)


@pytest.mark.parametrize("num_frozen", [1, 2])
def test_replicas_that_train_different_parameters_are_told(num_frozen: int) -> None:
    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        for parameter in list(model.parameters())[:num_frozen]:
            parameter.requires_grad_(rank == 0)
        features = rows(2)[0].requires_grad_()
        with reducer.step(), pytest.raises(CollectiveMismatchError, match="layout"):
            model(features).sum().backward()

    on_two(build("linear"), body)


def test_a_frozen_layer_may_be_thawed_between_steps() -> None:
    start, batches = build("tied"), [rows(4, seed=1), rows(4, seed=2)]

    def thaw(model: nn.Module, backward: Callable[[], None]) -> None:
        plain(model, backward)
        model.get_submodule("frozen").requires_grad_(True)

    expected = train_alone(copy.deepcopy(start), batches, thaw)
    assert_equal_parameters(expected, train_together(start, batches, thaw, world_size=2), start=start)


def test_replicas_with_different_numbers_of_backward_passes_are_told() -> None:
    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        def backward() -> None:
            loss_of(model, rows(2)).backward()

        with reducer.step():
            backward()
            if rank == 1:
                with pytest.raises(CollectiveMismatchError, match=said):
                    backward()
        if rank == 0:
            with reducer.step(), pytest.raises(CollectiveMismatchError, match=said):
                backward()

    said = "rank 0: step 1, backward pass 1, op MEAN; rank 1: step 0, backward pass 2, op MEAN"
    on_two(build("linear"), body)


@pytest.mark.parametrize("num_before", [0, 1])
def test_replicas_that_reduce_differently_are_told(num_before: int) -> None:
    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        for _ in range(num_before):
            with reducer.step():
                loss_of(model, rows(2)).backward()
        with (
            reducer.step(op=ReduceOp.SUM if rank else ReduceOp.MEAN),
            pytest.raises(CollectiveMismatchError, match=r"rank 0: .*op MEAN; rank 1: .*op SUM"),
        ):
            loss_of(model, rows(2)).backward()

    on_two(build("linear"), body)


@pytest.mark.parametrize("others", [Updates(3, (0.1,)), Updates(2, (0.2,))])
def test_replicas_that_updated_differently_are_told_at_the_next_backward(others: Updates) -> None:
    def main(group: LocalGroup) -> str:
        mine = [Updates(1, (0.1,)), Updates(1, (0.1,))]
        reducer = GradientReducer(group, updates=lambda: mine.pop(0))
        weight = nn.Parameter(torch.ones(2))
        reducer.attach((weight,))
        with reducer.step():
            weight.sum().backward()
        mine[0] = others if group.rank == 1 else Updates(2, (0.1,))
        with reducer.step(), pytest.raises(CollectiveMismatchError, match="the updates made before step 1") as caught:
            weight.sum().backward()
        return str(caught.value)

    first, second, third = run_ranks(3, main)
    assert first == second == third
    assert "rank 1 differs from the others" in first
