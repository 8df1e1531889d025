"""Hooks of the program on parameters see the global gradient."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from raydist.collectives.reducer.reducer import GradientReducer
from raydist.errors import FailedPreconditionError
from tests.collectives.gradient_steps import (
    gradients_of,
    half,
    on_two,
)
from tests.collectives.local_group import LocalGroup
from tests.collectives.models import (
    build,
    loss_of,
    rows,
    train_alone,
)
from tests.collectives.threads import run_ranks


def test_hooks_see_the_global_gradient_and_what_was_there_before() -> None:
    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        weight = next(model.parameters())
        seen: list[tuple[str, float | None, float | None]] = []

        def before(gradient: torch.Tensor) -> None:
            earlier = weight.grad
            seen.append(("before", gradient.sum().item(), None if earlier is None else earlier.sum().item()))

        def after(parameter: torch.Tensor) -> None:
            seen.append(("after", parameter.grad.sum().item() if parameter.grad is not None else None, None))

        weight.register_hook(before)
        weight.register_post_accumulate_grad_hook(after)
        weight.register_hook(lambda gradient: gradient * 10)
        with reducer.step(weight=0.5):
            for _ in range(2):
                model(torch.full((1, 2), float(rank))).sum().backward()
        assert seen == [("before", 1.0, None), ("after", 10.0, None), ("before", 1.0, 10.0), ("after", 20.0, None)]

    on_two(nn.Linear(2, 1), body)


def test_hooks_run_in_the_same_order_everywhere_also_for_what_only_others_use() -> None:
    def body(group: LocalGroup) -> list[int]:
        model, order = copy.deepcopy(start), []
        for number, parameter in enumerate(model.parameters()):
            note = functools.partial(lambda n, _: order.append(n), number)
            parameter.register_post_accumulate_grad_hook(note)
        reducer = GradientReducer(group, bucket_bytes=8, first_bucket_bytes=8)
        reducer.attach(model.parameters())
        for _ in range(2):
            with reducer.step(weight=0.5):
                used = model[:3] if group.rank else nn.Sequential(model[2], model[0])
                used(torch.ones(1, 2)).sum().backward()
        return order

    start = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(4)])
    first, second = run_ranks(2, body)
    assert first == second
    assert sorted(first) == [0, 0, 1, 1, 2, 2]


def test_hooks_of_several_parameters_and_those_that_remove_themselves() -> None:
    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        weight, bias = model.parameters()
        seen: list[object] = []
        register_multi_grad_hook(
            (weight, bias), lambda both: seen.append([float(g.sum()) for g in both if g is not None])
        )

        def once(gradient: torch.Tensor) -> None:
            seen.append(float(gradient.sum()))
            handle.remove()

        handle = weight.register_hook(once)
        with reducer.step(weight=0.5):
            for _ in range(2):
                model(torch.full((1, 2), float(rank))).sum().backward()
        assert sorted(map(str, seen)) == ["1.0", "[1.0, 1.0]", "[1.0, 1.0]"]

    on_two(nn.Linear(2, 1), body)


def test_hooks_under_no_sync_wait_for_the_global_sum() -> None:
    start, batch = build("linear"), rows(4)

    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        seen: list[torch.Tensor] = []

        def triple(gradient: torch.Tensor) -> torch.Tensor:
            seen.append(gradient.clone())
            return gradient * 3

        next(model.parameters()).register_hook(triple)
        with reducer.step(weight=0.5):
            with reducer.no_sync():
                loss_of(model, half(batch, rank)).backward()
            assert not seen
            loss_of(model, half(batch, rank)).backward()
        torch.testing.assert_close(seen, [2 * alone], rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(next(model.parameters()).grad, 6 * alone, rtol=1e-12, atol=1e-15)

    reference = train_alone(copy.deepcopy(start), [batch], lambda _, backward: backward())
    alone = torch.cat([gradient for gradient in gradients_of(reference)[:1] if gradient is not None])
    on_two(start, body)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")  # torch says it once a process
def test_hooks_with_a_graph_and_their_errors() -> None:
    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        weight = next(model.parameters())
        modes: list[bool] = []

        def double(gradient: torch.Tensor) -> torch.Tensor:
            modes.append(torch.is_grad_enabled())
            return gradient * 2

        handle = weight.register_hook(double)
        with reducer.step(weight=0.5):
            (weight.sum() ** 2).backward(create_graph=True)
            gradient = weight.grad
            assert gradient is not None
            weight.grad = None
            gradient.sum().backward()
            torch.testing.assert_close(weight.grad, torch.full_like(weight, 16.0))
            handle.remove()
            weight.register_hook(lambda gradient: weight.sum().backward())
            with pytest.raises(FailedPreconditionError, match=r"must not call backward\(\)"):
                weight.sum().backward()
        assert modes == [True, False]

    on_two(nn.Linear(2, 1).double(), body)
