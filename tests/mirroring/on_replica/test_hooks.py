"""Hooks of a replica: new parameters and moves are refused, optimizer steps are noted."""

from __future__ import annotations

import gc
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from raydist.core.errors import FailedPreconditionError
from raydist.mirroring.handles import ReplicaTable
from raydist.mirroring.replica_hooks import UpdateLog, note_steps
from tests.mirroring.in_process import Mirror, linear


def test_new_parameter_in_a_mirrored_module(mirror: Mirror, layer: nn.Linear) -> None:
    def step() -> None:
        layer.bias = nn.Parameter(torch.zeros(1))

    with pytest.raises(FailedPreconditionError, match="a step registered 'bias' in Linear"):
        mirror.run(step)


def test_new_submodule_in_a_mirrored_module(mirror: Mirror, layer: nn.Linear) -> None:
    with pytest.raises(FailedPreconditionError, match="a step registered 'head' in Linear"):
        mirror.run(lambda: layer.add_module("head", nn.Linear(1, 1)))


@pytest.mark.parametrize("inner", [False, True])
def test_a_module_that_a_step_moves_is_named_and_stays(inner: bool, mirror: Mirror, layer: nn.Linear) -> None:
    mirror.run(lambda: layer.training)
    before = layer.weight.tolist()
    step = (lambda: nn.Sequential(layer).to("meta")) if inner else (lambda: layer.to(torch.device("meta")))
    with pytest.raises(FailedPreconditionError, match=r"\(cpu\); a step moves a Linear to meta. Leave out .to"):
        mirror.run(step)
    assert layer.weight.tolist() == before
    mirror.run(lambda: layer.to("cpu"))
    mirror.run(lambda: nn.Sequential(nn.Linear(1, 1)).to("meta"))
    layer.to("cpu")
    assert nn.Linear(1, 1).to("meta").weight.is_meta


def test_what_is_allowed(mirror: Mirror) -> None:
    layer: Any = linear(mirror)
    other = linear(mirror)

    def step() -> int:
        own = nn.Sequential(nn.Linear(1, 1))
        layer.activation = nn.ReLU()
        layer.weight = other.weight
        layer.bias = None
        return len(list(own.parameters()))

    assert mirror.run(step) == [2, 2]
    assert layer.weight is other.weight


def test_nothing_is_watched_after_the_step(mirror: Mirror, layer: nn.Linear) -> None:
    with pytest.raises(ZeroDivisionError):
        mirror.run(lambda: layer.in_features / 0)
    assert nn.Linear(1, 1).bias is not None


def test_a_scheduler_made_elsewhere_does_not_warn() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    steps: list[int] = []
    note_steps(optimizer, lambda: steps.append(1))
    note_steps(optimizer, lambda: steps.append(2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    parameter.grad = torch.ones(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()
    assert parameter.item() == 0.0
    assert optimizer._opt_called is True  # type: ignore[attr-defined]
    assert steps == [1]


def test_optimizer_is_not_kept_alive() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    note_steps(optimizer, lambda: None)
    ghost = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert ghost() is None


def test_still_pickles() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    note_steps(optimizer, lambda: None)
    assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["lr"] == 0.5


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
    with torch.profiler.profile(acc_events=True) as profile:
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


def test_profiles_name_the_clearing() -> None:
    optimizer = sgd()
    note_steps(optimizer, lambda: None)
    with torch.profiler.profile(acc_events=True) as profile:
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


def test_rates_of_every_group_of_every_optimizer() -> None:
    table = ReplicaTable()
    log = UpdateLog(table)
    assert log.rates() == ()
    weight, bias = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    groups: list[dict[str, Any]] = [{"params": [weight], "lr": 0.5}, {"params": [bias]}]
    table.add(0, torch.optim.SGD(groups, lr=0.25))
    table.add(1, weight)
    adam = torch.optim.Adam([bias], lr=torch.tensor(2.0))
    table.add(2, adam)
    assert log.rates() == (0.5, 0.25, 2.0)
    adam.param_groups[0]["lr"] = 3.0
    assert log.rates() == (0.5, 0.25, 3.0)


def test_counts_from_the_last_restart() -> None:
    log = UpdateLog(ReplicaTable())
    log.note()
    log.note()
    assert log.count == 2
    log.restart()
    log.note()
    assert log.count == 1
