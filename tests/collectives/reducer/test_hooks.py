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
    OwnHook,
    ParameterHooks,
    begin_interception,
    detach_hooks,
    end_interception,
    hooked_of,
)
from raydist.collectives.reducer.reducer import GradientReducer
from raydist.core.errors import FailedPreconditionError
from tests.collectives.local_group import LocalGroup
from tests.collectives.models import (
    build,
    gradients_of,
    half,
    loss_of,
    on_two,
    rows,
    train_alone,
)
from tests.collectives.threads import run_ranks

# --- hooks on parameters: read, attached and deferred -----------------------------------------------------------------


def weight(own: list[str] | None = None) -> nn.Parameter:
    """A parameter with a hook of raydist's after its gradient, as every parameter of a reducer has one."""
    parameter = nn.Parameter(torch.ones(1))
    parameter.register_post_accumulate_grad_hook(OwnHook((own if own is not None else []).append))
    return parameter


def twice(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 2


def drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


def backward(parameter: nn.Parameter) -> float | None:
    parameter.grad = None
    parameter.sum().backward()
    gradient: torch.Tensor | None = parameter.grad
    return None if gradient is None else gradient.item()


def test_own_hooks_are_not_the_programs() -> None:
    parameter = weight()
    parameter.register_hook(OwnHook(lambda _: None))
    assert not hooked_of([(0, parameter)])
    assert not ParameterHooks.of(parameter)
    handle = parameter.register_hook(twice)
    assert hooked_of([(0, parameter)])
    assert list(ParameterHooks.of(parameter).before.values()) == [twice]
    handle.remove()
    assert not hooked_of([(0, parameter)])
    parameter.register_post_accumulate_grad_hook(drop)
    assert hooked_of([(0, parameter)])
    assert list(ParameterHooks.of(parameter).after.values()) == [drop]


def test_attached_elsewhere_under_keys_of_their_own() -> None:
    source, target = weight(), weight()
    first = source.register_hook(twice)
    hooks = ParameterHooks.of(source).under("there")
    assert hooks.keys() == {("there", first.id)}
    taken = target.register_hook(twice)
    hooks.attach(target)
    assert backward(target) == 4.0
    second = source.register_post_accumulate_grad_hook(drop)
    ParameterHooks.of(source).without([first.id]).under("there").attach(target)
    assert backward(target) is None
    detach_hooks(target, [("there", second.id), ("there", "never there")])
    assert backward(target) == 4.0
    taken.remove()
    assert backward(target) == 2.0


def test_numbers_of_another_process_replace_nothing() -> None:
    target = weight()
    taken = target.register_hook(twice)
    ParameterHooks({taken.id: twice}, {}).attach(target)
    assert backward(target) == 4.0


def test_a_frozen_parameter_takes_them() -> None:
    target = nn.Parameter(torch.ones(1), requires_grad=False)
    ParameterHooks({("there", 1): twice}, {}).attach(target)
    target.requires_grad_(True)
    assert backward(target) == 2.0


@pytest.mark.parametrize("removed", [False, True])
def test_held_back_and_given_back(removed: bool) -> None:
    own: list[str] = []
    parameter = weight(own)
    handle = parameter.register_hook(twice)
    held = DeferredHooks({7: parameter})
    assert 7 in held.indices
    assert backward(parameter) == 1.0
    assert len(own) == 1
    later = parameter.register_hook(twice)
    if removed:
        handle.remove()
    held.give_back()
    held.give_back()
    assert backward(parameter) == (2.0 if removed else 4.0)
    later.remove()
    assert backward(parameter) == (1.0 if removed else 2.0)


# --- hooks of the program see the global gradient ---------------------------------------------------------------------


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


# --- interception -----------------------------------------------------------------------------------------------------


class Recorder:
    """Counts the calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.num_calls += 1
        original(*args, **kwargs)


@contextmanager
def intercepted(handler: Handler) -> Iterator[None]:
    token = begin_interception(handler)
    try:
        yield
    finally:
        end_interception(token)


def test_sees_every_way_to_call_it_and_then_no_more() -> None:
    recorder, x = Recorder(), torch.ones(2, requires_grad=True)
    for _ in range(2):
        with intercepted(recorder):
            x.sum().backward()
            torch.autograd.backward(x.sum())
            torch.autograd.grad(x.sum(), x)
        x.sum().backward()
    assert recorder.num_calls == 4
    assert x.grad is not None
    assert x.grad.tolist() == [6.0, 6.0]


def test_steps_share_one_wrapper_also_where_other_code_restores_the_original() -> None:
    """By `mock.patch`, say. A new one for each would have torch disable its compiler for each."""
    recorder, x, original = Recorder(), torch.ones(1, requires_grad=True), torch.autograd.backward
    installed = []
    try:
        for _ in range(2):
            with intercepted(recorder):
                x.sum().backward()
                installed.append(torch.autograd.backward)
            torch.autograd.backward = original
    finally:
        torch.autograd.backward = original
    assert recorder.num_calls == 2
    assert installed[0] is installed[1]


def test_a_wrapper_that_came_later_is_called_too() -> None:
    original, x, seen = torch.autograd.backward, torch.ones(1, requires_grad=True), []

    def foreign(*args: Any, **kwargs: Any) -> None:
        seen.append(1)
        inner(*args, **kwargs)

    try:
        with intercepted(Recorder()):
            inner = torch.autograd.backward
            torch.autograd.backward = foreign
        x.sum().backward()
        recorder = Recorder()
        with intercepted(recorder):
            x.sum().backward()
        assert seen == [1, 1]
        assert recorder.num_calls  # by each wrapper
    finally:
        torch.autograd.backward = original
