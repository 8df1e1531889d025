"""Hooks on parameters: told from raydist's own, taken along, and held back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raydist.collectives.reducer.parameter_hooks import HeldBack, OwnHook, ParameterHooks, detach_hooks, hooked_of


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
    held = HeldBack({7: parameter})
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
