"""Hooks on parameters and gradients."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from raydist.collectives.reducer.parameter_hooks import (
    DeferredHooks,
    Handler,
    ParameterHooks,
    begin_interception,
    end_interception,
)
from raydist.collectives.reducer.reducer import GradientReducer
from raydist.core.errors import FailedPreconditionError
from tests.collectives.local_group import LocalGroup
from tests.collectives.models import build, gradients_of, half, loss_of, on_two, rows, train_alone
from tests.collectives.threads import run_ranks


def test_hooks_see_the_global_gradient_and_what_was_there_before() -> None:
    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        weight, bias = model.parameters()
        seen: list[Any] = []
        both_seen: list[list[float]] = []

        def before(gradient: torch.Tensor) -> None:
            earlier = weight.grad
            seen.append(("before", gradient.sum().item(), None if earlier is None else earlier.sum().item()))

        def once(gradient: torch.Tensor) -> None:
            seen.append("once")
            handle.remove()

        weight.register_hook(before)
        weight.register_post_accumulate_grad_hook(lambda own: seen.append(("after", own.grad.sum().item())))
        weight.register_hook(lambda gradient: gradient * 10)
        handle = weight.register_hook(once)
        register_multi_grad_hook(
            (weight, bias), lambda both: both_seen.append([float(g.sum()) for g in both if g is not None])
        )
        with reducer.step(weight=0.5):
            for _ in range(2):
                model(torch.full((1, 2), float(rank))).sum().backward()
        assert seen == [
            *(("before", 1.0, None), "once", ("after", 10.0)),
            *(("before", 1.0, 10.0), ("after", 20.0)),
        ]
        assert both_seen == [[10.0, 1.0]] * 2

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


def record(calls: list[int], original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A handler that notes its calls."""
    calls.append(1)
    original(*args, **kwargs)


@contextmanager
def intercepted(handler: Handler) -> Iterator[None]:
    token = begin_interception(handler)
    try:
        yield
    finally:
        end_interception(token)


def test_sees_every_way_to_call_it_and_then_no_more() -> None:
    calls: list[int] = []
    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        with intercepted(functools.partial(record, calls)):
            x.sum().backward()
            torch.autograd.backward(x.sum())
            torch.autograd.grad(x.sum(), x)
        x.sum().backward()
    assert len(calls) == 4
    assert x.grad is not None
    assert x.grad.tolist() == [6.0, 6.0]


def test_steps_share_one_wrapper_also_where_other_code_restores_the_original_and_a_later_wrapper_is_called() -> None:
    """By `mock.patch`, say. A new one for each would have torch disable its compiler for each."""
    x, original = torch.ones(1, requires_grad=True), torch.autograd.backward
    calls: list[int] = []
    seen: list[int] = []
    installed: list[Callable[..., None]] = []

    def foreign(*args: Any, **kwargs: Any) -> None:
        seen.append(1)
        installed[0](*args, **kwargs)

    try:
        for _ in range(2):
            with intercepted(functools.partial(record, calls)):
                x.sum().backward()
                installed.append(torch.autograd.backward)
            torch.autograd.backward = original
        assert len(calls) == 2
        assert installed[0] is installed[1]
        torch.autograd.backward = foreign
        x.sum().backward()
        with intercepted(functools.partial(record, calls)):
            x.sum().backward()
        assert seen == [1, 1]
        assert len(calls) > 2  # by each wrapper
    finally:
        torch.autograd.backward = original


def twice(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 2


def gradient_of(parameter: nn.Parameter) -> float:
    parameter.grad = None
    parameter.sum().backward()
    gradient: Any = parameter.grad
    return float(gradient)


def test_a_hook_that_was_removed_meanwhile_is_not_given_back() -> None:
    parameter = nn.Parameter(torch.ones(1))
    handle = parameter.register_hook(twice)
    held = DeferredHooks({7: parameter})
    handle.remove()
    held.give_back()
    assert gradient_of(parameter) == 1.0


def test_hooks_of_another_process_replace_nothing_under_their_number() -> None:
    target = nn.Parameter(torch.ones(1))
    taken = target.register_hook(twice)
    ParameterHooks({taken.id: twice}, {}).attach(target)
    assert gradient_of(target) == 4.0
