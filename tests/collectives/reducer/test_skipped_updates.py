from __future__ import annotations

import _thread
import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn

from raydist.collectives.reducer.nonfinite import SkippedUpdates


def trained(layer: nn.Module) -> torch.optim.Optimizer:
    layer(torch.ones(1, 2)).sum().backward()
    return torch.optim.Adam(layer.parameters(), lr=0.1)


def test_a_step_that_is_due_changes_nothing_and_shows_its_gradients_again() -> None:
    layer = nn.Linear(2, 1)
    optimizer = trained(layer)
    before, gradient = copy.deepcopy(layer.state_dict()), layer.weight.grad
    skipped = SkippedUpdates(lambda _: True)
    with skipped.watch():
        optimizer.step()
    assert layer.weight.grad is gradient
    assert not optimizer.state
    torch.testing.assert_close(layer.state_dict(), before, rtol=0, atol=0)
    assert skipped.count == 1
    optimizer.step()
    assert not torch.equal(layer.weight, before["weight"])


def test_closures_are_asked_after_they_ran() -> None:
    layer = nn.Linear(2, 1)
    bad = [False]
    skipped = SkippedUpdates(lambda _: bad[0])
    for make, given in ((torch.optim.SGD, "position"), (torch.optim.SGD, "name"), (torch.optim.LBFGS, "position")):
        optimizer: Any = make(layer.parameters(), lr=0.1)
        for now in (False, True):
            before = layer.weight.detach().clone()
            bad[0] = False

            def closure(now: bool = now, optimizer: Any = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = layer(torch.ones(1, 2)).square().sum()
                loss.backward()
                bad[0] = now
                return loss

            with skipped.watch():
                loss = optimizer.step(closure) if given == "position" else optimizer.step(closure=closure)
            assert isinstance(loss, torch.Tensor)
            assert torch.equal(before, layer.weight) is now
            assert layer.weight.grad is not None
    assert skipped.count == 3


def test_only_the_thread_that_watches() -> None:
    layer = nn.Linear(2, 1)
    optimizer = trained(layer)
    before = layer.weight.detach().clone()
    with SkippedUpdates(lambda _: True).watch():
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        thread.join()
    assert not torch.equal(layer.weight, before)


class Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ZeroDivisionError


def test_gradients_are_back_after_a_step_that_raised() -> None:
    layer = nn.Linear(2, 1)
    trained(layer)
    with pytest.raises(ZeroDivisionError), SkippedUpdates(lambda _: True).watch():
        Failing(layer.parameters(), lr=0.1).step()
    assert layer.weight.grad is not None


def test_the_engines_threads_count_as_the_thread_of_the_only_one_that_watches() -> None:
    """On a GPU torch calls hooks on parameters from a thread of its own, which Python has not started."""
    layer = nn.Linear(2, 1)
    optimizer = trained(layer)
    before = layer.weight.detach().clone()
    ended = threading.Event()

    def step() -> None:
        optimizer.step()
        ended.set()

    with SkippedUpdates(lambda _: True).watch():
        _thread.start_new_thread(step, ())
        assert ended.wait(10)
    assert torch.equal(layer.weight, before)
    assert layer.weight.grad is not None
