"""Gradients that no backward pass has made global, and those that were changed afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from raydist.collectives.reducer.reducer import GradientReducer
from raydist.errors import CollectiveMismatchError, FailedPreconditionError
from raydist.values import ReduceOp
from tests.collectives.gradient_steps import gradients_of, half, on_two
from tests.collectives.models import build, loss_of, rows

Fill = Callable[[nn.Module, torch.Tensor], None]


def replace(model: nn.Module, loss: torch.Tensor) -> None:
    for parameter, gradient in zip(
        model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
    ):
        parameter.grad = gradient


def fill_again(model: nn.Module, loss: torch.Tensor) -> None:
    """As programs do that keep one tensor for each gradient."""
    for parameter, gradient in zip(
        model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
    ):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.zero_().add_(gradient)


@pytest.mark.parametrize("fill", [replace, fill_again])
def test_gradients_made_by_hand_are_weighted_and_exchanged(fill: Fill) -> None:
    start, batches = build("linear"), [rows(3, seed=1), rows(3, seed=2)]
    alone = copy.deepcopy(start)

    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        for batch in batches:
            with reducer.step(weight=(2 / 3, 1 / 3)[rank]):
                fill(model, loss_of(model, half(batch, rank)))
                held = gradients_of(model)
                assert reducer.make_global(list(model.parameters()))
                # What the program holds is what one device would hold.
                assert all(one is now for one, now in zip(held, gradients_of(model), strict=True))
                assert not reducer.make_global(list(model.parameters()))  # another optimizer steps

    replicas = on_two(start, body)
    fill(alone, loss_of(alone, batches[-1]))
    for replica in replicas:
        torch.testing.assert_close(gradients_of(replica), gradients_of(alone), rtol=1e-12, atol=1e-14)


def test_a_backward_pass_takes_along_what_was_made_by_hand_before_it() -> None:
    start, batch = build("linear"), rows(3)
    alone = copy.deepcopy(start)

    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        with reducer.step(weight=(2 / 3, 1 / 3)[rank]):
            replace(model, loss_of(model, half(batch, rank)))
            (3 * loss_of(model, half(batch, rank))).backward()
            assert not reducer.make_global(list(model.parameters()))

    (4 * loss_of(alone, batch)).backward()
    for replica in on_two(start, body):
        torch.testing.assert_close(gradients_of(replica), gradients_of(alone), rtol=1e-12, atol=1e-14)


def test_frozen_parameters_with_gradients_made_by_hand() -> None:
    """Evolution strategies and forward-mode differentiation need no parameter that requires a gradient."""

    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        with reducer.step(weight=0.5):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, float(rank))
            assert reducer.make_global(list(model.parameters()))
            assert not any(parameter.requires_grad for parameter in model.parameters())

    for replica in on_two(build("linear").requires_grad_(False), body):
        assert all(gradient is not None and bool((gradient == 0.5).all()) for gradient in gradients_of(replica))


def changed(change: Callable[[torch.Tensor, int], object]) -> Callable[[nn.Module, GradientReducer, int], None]:
    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        for number in range(2):
            with reducer.step(weight=0.5):
                model.zero_grad()
                loss_of(model, half(rows(4), rank)).backward()
                for gradient in gradients_of(model):
                    if number == 0 and gradient is not None:
                        change(gradient, rank)
                assert not reducer.make_global(list(model.parameters()))

    return body


def test_a_gradient_changed_differently_after_backward_is_an_error_one_step_later() -> None:
    with pytest.raises(CollectiveMismatchError, match=r"a parameter of shape \(1, 6\) differently.*replica 1: sum"):
        on_two(build("linear"), changed(lambda gradient, rank: gradient.add_(0.01 * rank)))
    with pytest.raises(CollectiveMismatchError, match=r"replica 0: not changed; replica 1: sum"):
        on_two(build("linear"), changed(lambda gradient, rank: gradient.add_(1) if rank else None))


@pytest.mark.parametrize("factors", [(0.5, 0.5), (0.5, 0.5 + 1e-12)])
def test_changes_that_are_alike_or_differ_in_last_bits_are_no_error(factors: tuple[float, float]) -> None:
    on_two(build("linear"), changed(lambda gradient, rank: gradient.mul_(factors[rank])))


def test_where_gradients_are_added_up_one_that_may_be_global_is_an_error() -> None:
    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        for number in range(2):
            with reducer.step(op=ReduceOp.SUM):
                fill_again(model, loss_of(model, rows(2)))
                if number:
                    with pytest.raises(FailedPreconditionError, match="must be put into an empty .grad"):
                        reducer.make_global(list(model.parameters()))
                else:
                    assert reducer.make_global(list(model.parameters()))

    on_two(build("linear"), body)
