from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

from raydist.collectives.reducer.parameter_hooks import OwnHook
from raydist.collectives.reducer.reducer import GradientReducer
from raydist.values import ReduceOp
from tests.collectives.gradient_steps import (
    gradients_of,
    half,
    on_two,
)
from tests.collectives.local_group import LocalGroup
from tests.collectives.models import (
    FEATURES,
    build,
    loss_of,
    rows,
    train_alone,
)
from tests.collectives.threads import run_ranks


def test_no_sync_keeps_gradients_local_until_the_next_backward() -> None:
    start, one, two = build("tied"), rows(5, seed=1), rows(3, seed=2)

    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        with reducer.step(weight=len(half(one, rank)[0]) / 5), reducer.no_sync():
            loss_of(model, half(one, rank)).backward()
            local = copy.deepcopy(start)
            loss_of(local, half(one, rank)).backward()
            torch.testing.assert_close(gradients_of(model), gradients_of(local))
        with reducer.step(weight=len(half(two, rank)[0]) / 3):
            loss_of(model, half(two, rank)).backward()

    expected = train_alone(copy.deepcopy(start), [one, two], lambda _, backward: backward())
    for replica in on_two(start, body):
        torch.testing.assert_close(gradients_of(replica), gradients_of(expected), rtol=1e-12, atol=1e-15)


def test_no_sync_after_global_gradients_and_dropped_ones() -> None:
    start, batch = build("linear"), rows(4)

    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        def backward() -> None:
            loss_of(model, half(batch, rank)).backward()

        with reducer.step(weight=0.5):
            with reducer.no_sync():
                backward()
            model.zero_grad()  # these never count
            backward()
            with reducer.no_sync():
                backward()
                backward()
            backward()

    reference = copy.deepcopy(start)
    for _ in range(4):
        loss_of(reference, batch).backward()
    for replica in on_two(start, body):
        torch.testing.assert_close(gradients_of(replica), gradients_of(reference), rtol=1e-12, atol=1e-15)


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

    expected = train_alone(copy.deepcopy(start), [batch], lambda _, backward: backward())
    for replica in on_two(start, body):
        torch.testing.assert_close(gradients_of(replica), gradients_of(expected), rtol=1e-12, atol=1e-15)


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
