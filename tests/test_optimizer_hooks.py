from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

from raydist.mirroring.on_replica.replica_hooks import note_steps
from raydist.optimizer_hooks import clear_gradients, is_unobserved, unobserved_step


@pytest.fixture(autouse=True)
def _no_global_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have registered some for good."""
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        monkeypatch.setattr(torch_optimizer, name, OrderedDict())


def sgd() -> torch.optim.SGD:
    parameter = torch.ones(2, requires_grad=True)
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter], lr=0.5)


class Own(torch.optim.Optimizer):
    """One of a user's, which counts its steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1


def test_hooks_and_profilers_look() -> None:
    optimizer = sgd()
    assert is_unobserved(optimizer)
    handle = optimizer.register_step_pre_hook(lambda *told: None)
    assert not is_unobserved(optimizer)
    handle.remove()
    everywhere = torch_optimizer.register_optimizer_step_post_hook(lambda *told: None)
    assert not is_unobserved(optimizer)
    everywhere.remove()
    with torch.profiler.profile():
        assert not is_unobserved(optimizer)
    assert is_unobserved(optimizer)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.LBFGS])
def test_the_step_itself_is_the_same(kind: type[Any]) -> None:
    values = []
    for step in (kind.step, unobserved_step(kind)):
        parameter = torch.ones(2, requires_grad=True)
        optimizer = kind([parameter], lr=0.5)

        def loss(parameter: torch.Tensor = parameter, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            found = parameter.square().sum()
            found.backward()
            return found

        loss()
        assert step(optimizer, loss).item() == 2
        values.append(parameter.detach())
    assert torch.equal(*values)


def test_a_step_of_ones_own_is_called() -> None:
    optimizer = Own([torch.ones(2, requires_grad=True)])
    note_steps(optimizer, lambda: None)
    optimizer.step()
    assert optimizer.steps == 1


def test_hooks_that_come_later_are_called() -> None:
    optimizer = sgd()
    note_steps(optimizer, lambda: None)
    called: list[str] = []
    optimizer.step()
    optimizer.register_step_pre_hook(lambda *told: called.append("before"))
    optimizer.register_step_post_hook(lambda *told: called.append("after"))
    optimizer.step()
    assert called == ["before", "after"]
    assert optimizer.param_groups[0]["params"][0].tolist() == [0, 0]


def test_profiles_name_the_step() -> None:
    optimizer = sgd()
    note_steps(optimizer, lambda: None)
    with torch.profiler.profile() as profile:
        optimizer.step()
    assert "Optimizer.step#SGD.step" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_cleared_as_torch_does_it(set_to_none: bool) -> None:
    optimizer = sgd()
    (parameter,) = optimizer.param_groups[0]["params"]
    note_steps(optimizer, lambda: None)
    optimizer.zero_grad(set_to_none)
    cleared = parameter.grad
    assert cleared is None if set_to_none else cleared.tolist() == [0, 0]
    parameter.grad = torch.ones(2)
    clear_gradients(optimizer)
    assert parameter.grad is None


def test_profiles_name_the_clearing() -> None:
    optimizer = sgd()
    note_steps(optimizer, lambda: None)
    with torch.profiler.profile() as profile:
        optimizer.zero_grad()
    assert "Optimizer.zero_grad#SGD.zero_grad" in {event.key for event in profile.key_averages()}


def test_clearing_of_ones_own_is_called() -> None:
    class Counting(Own):
        def zero_grad(self, set_to_none: bool = True) -> None:
            self.steps += 100

    optimizer = Counting([torch.ones(2, requires_grad=True)])
    note_steps(optimizer, lambda: None)
    optimizer.zero_grad()
    assert optimizer.steps == 100
