"""Which tensors gradients are, and what memory they take."""

from __future__ import annotations

import copy

import torch
from torch import nn

from raydist.collectives.reducer.reducer import GradientReducer
from tests.collectives.gradient_steps import (
    gradients_of,
    on_two,
)
from tests.collectives.local_group import LocalGroup
from tests.collectives.models import (
    FEATURES,
    build,
    loss_of,
    rows,
)
from tests.collectives.threads import run_ranks


def test_mixed_dtypes_travel_in_their_own() -> None:
    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        with reducer.step(weight=0.5):
            torch.stack([(parameter * (rank + 1)).float().sum() for parameter in model.parameters()]).sum().backward()

    start = nn.ParameterList([torch.ones(5, dtype=dtype) for dtype in (torch.float64, torch.bfloat16, torch.float32)])
    for replica in on_two(start, body):
        for parameter in replica.parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype == parameter.dtype
            assert parameter.grad.tolist() == [1.5] * 5


def test_memory_format_follows_the_parameter() -> None:
    start = nn.Conv2d(2, 3, 2)
    start.weight.data = start.weight.data.contiguous(memory_format=torch.channels_last)

    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        with reducer.step(weight=0.5):
            model(torch.arange(32.0).reshape(1, 2, 4, 4) + rank).sum().backward()

    expected = copy.deepcopy(start)
    expected(torch.arange(32.0).reshape(1, 2, 4, 4) + 0.5).sum().backward()
    for replica in on_two(start, body):
        torch.testing.assert_close(gradients_of(replica), gradients_of(expected))


def test_gradients_stay_the_tensors_that_they_are() -> None:
    """As without replicas: what is added to a gradient is seen by whoever holds it."""

    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        def backward() -> None:
            loss_of(model, rows(2)).backward()

        with reducer.step(weight=0.5):
            backward()
            held = gradients_of(model)
            seen = [gradient.view(-1) for gradient in held if gradient is not None]
            first = [gradient.clone() for gradient in seen]
            backward()
            assert all(now is before for now, before in zip(gradients_of(model), held, strict=True))
            torch.testing.assert_close(seen, [2 * gradient for gradient in first])
            del held
            backward()
            torch.testing.assert_close(seen, [3 * gradient for gradient in first])

    on_two(build("linear"), body)


def test_a_step_allocates_no_memory_for_gradients() -> None:
    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        addresses = []
        with reducer.step(weight=0.5):
            for _ in range(4):
                model.zero_grad()
                loss_of(model, rows(2)).backward()
                addresses.append([p.grad.data_ptr() for p in model.parameters() if p.grad is not None])
        # The first pass of several buckets finds the order of the others.
        assert addresses[1] == addresses[2] == addresses[3]

    on_two(nn.Sequential(nn.Linear(FEATURES, 3), nn.Tanh(), nn.Linear(3, 1)).double(), body)


def test_a_model_that_was_dropped_travels_no_more() -> None:
    def body(group: LocalGroup) -> None:
        models = [build("linear"), build("linear")]
        reducer = GradientReducer(group)
        for model in models:
            reducer.attach(tuple(model.parameters()))
            with reducer.step(weight=0.5):
                loss_of(model, rows(2)).backward()
        with reducer.step(weight=0.5):
            loss_of(models[0], rows(2)).backward()
        local, reduced = build("linear"), gradients_of(models[1])
        loss_of(local, rows(2)).backward()
        torch.testing.assert_close(reduced, gradients_of(local))
        torch.testing.assert_close(gradients_of(models[0]), [2 * g for g in gradients_of(local) if g is not None])

    run_ranks(2, body)
