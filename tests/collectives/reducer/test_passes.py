"""Passes that are synchronised, accumulated, or over some of the parameters."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from raydist.collectives.reducer.parameter_hooks import OwnHook
from raydist.collectives.reducer.reducer import GradientReducer
from raydist.core.errors import CollectiveMismatchError, FailedPreconditionError
from raydist.core.values import ReduceOp
from tests.collectives.local_group import LocalGroup
from tests.collectives.models import (
    FEATURES,
    assert_gradients_of_one,
    build,
    gradients_of,
    half,
    loss_of,
    on_two,
    rows,
    train_alone,
)
from tests.collectives.threads import run_ranks


def test_no_sync_keeps_gradients_local_until_the_next_backward() -> None:
    start, one, two = build("shared"), rows(5, seed=1), rows(3, seed=2)

    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        def backward(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
            loss_of(model, half(batch, rank)).backward()

        with reducer.step(weight=len(half(one, rank)[0]) / 5), reducer.no_sync():
            backward(one)
            local = copy.deepcopy(start)
            loss_of(local, half(one, rank)).backward()
            torch.testing.assert_close(gradients_of(model), gradients_of(local))
        with reducer.step(weight=len(half(two, rank)[0]) / 3):
            backward(two)
            with reducer.no_sync():
                backward(two)
                backward(two)
            backward(two)
        found.append([None if each is None else each.clone() for each in gradients_of(model)])
        for set_to_none in (True, False):
            with reducer.step(weight=len(half(two, rank)[0]) / 3):
                with reducer.no_sync():
                    backward(two)
                model.zero_grad(set_to_none)  # these never count
                backward(two)

    found: list[list[torch.Tensor | None]] = []
    batches = [one, two, two, two, two]
    expected = train_alone(copy.deepcopy(start), batches, lambda _, backward: backward())
    assert_gradients_of_one(start, [two], body)
    for each in found:
        torch.testing.assert_close(each, gradients_of(expected), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("op", [ReduceOp.MEAN, ReduceOp.SUM])
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")  # torch warns of a reference cycle
def test_second_derivatives_go_through_the_reduction(op: ReduceOp) -> None:
    """The penalty is a function of the global gradient; each replica weighs it by something of its own."""
    start, batch = nn.Sequential(nn.Linear(FEATURES, 3), nn.Tanh(), nn.Linear(3, 1)).double(), rows(5)
    factors = [1.0, 3.0]
    sizes = [3, 2]

    def penalty(model: nn.Module, factor: float) -> torch.Tensor:
        return factor * torch.stack([(p.grad**3).sum() for p in model.parameters() if p.grad is not None]).sum()

    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        features, targets = half(batch, rank)
        with reducer.step(weight=sizes[rank] / 5, op=op):
            loss = nn.functional.mse_loss(model(features), targets)
            (loss if op is ReduceOp.MEAN else loss * sizes[rank] / 5).backward(create_graph=True)
            after = penalty(model, factors[rank])
            model.zero_grad()
            after.backward()

    reference = copy.deepcopy(start)
    loss_of(reference, batch).backward(create_graph=True)
    weights = [0.6, 0.4] if op is ReduceOp.MEAN else [1.0, 1.0]
    total = penalty(reference, sum(w * f for w, f in zip(weights, factors, strict=True)))
    reference.zero_grad()
    total.backward()
    for replica in on_two(start, body):
        torch.testing.assert_close(gradients_of(replica), gradients_of(reference), rtol=1e-9, atol=1e-14)


def test_an_error_in_backward_leaves_the_reducer_clean() -> None:
    start, batch = build("linear"), rows(4)

    def explode(gradient: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("in backward")

    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        weight = next(model.parameters())
        weight.grad = torch.full_like(weight, 7.0)
        handle = weight.register_hook(explode)
        with pytest.raises(ZeroDivisionError), reducer.step(weight=0.5):
            loss_of(model, half(batch, rank)).backward()
        assert torch.equal(weight.grad, torch.full_like(weight, 7.0))
        handle.remove()
        model.zero_grad()
        with reducer.step(weight=0.5):
            loss_of(model, half(batch, rank)).backward()

    assert_gradients_of_one(start, [batch], body)


def test_the_last_layers_travel_while_the_first_are_computed() -> None:
    start = nn.Sequential(*[nn.Linear(FEATURES, FEATURES) for _ in range(4)]).double()

    def body(group: LocalGroup) -> list[tuple[int, int]]:
        """Layers whose gradients are computed, with the number of buckets on their way by then."""
        model, events = copy.deepcopy(start), []
        reducer = GradientReducer(group, bucket_bytes=400, first_bucket_bytes=400)
        reducer.attach(model.parameters())
        for number, layer in enumerate(model.children()):
            note = functools.partial(lambda n, _: events.append((n, group.num_calls)), number)
            layer.get_parameter("weight").register_hook(OwnHook(note))  # a program's would wait for global gradients
        for _ in range(2):
            with reducer.step(weight=0.5):
                events.clear()
                before = group.num_calls
                model(rows(2)[0]).sum().backward()
        return [(layer, calls - before) for layer, calls in events] + [(-1, group.num_calls - before)]

    assert run_ranks(2, body) == [[(3, 0), (2, 1), (1, 2), (0, 3), (-1, 4)]] * 2


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


def test_a_gradient_that_was_zeroed_is_filled_anew() -> None:
    start, batch = build("linear"), rows(3)
    alone = copy.deepcopy(start)

    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        parameters = list(model.parameters())
        with reducer.step(weight=(2 / 3, 1 / 3)[rank]):
            loss_of(model, half(batch, rank)).backward()
            model.zero_grad(set_to_none=False)
            reducer.note_cleared(parameters)
            assert not reducer.make_global(parameters, used=False)
            fill_again(model, loss_of(model, half(batch, rank)))
            assert reducer.make_global(parameters)

    replicas = on_two(start, body)
    loss_of(alone, batch).backward()
    for replica in replicas:
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
    for last in (0.0, 1e-12):  # alike, and but for last bits
        factors = [0.5, 0.5 + last]
        on_two(build("linear"), changed(lambda gradient, rank: gradient.mul_(factors[rank])))  # noqa: B023


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
