"""A strategy that ships nothing finds what was not made under its scope all the same."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from raydist.core.errors import FailedPreconditionError
from raydist.mirroring.checked_steps import CheckedSteps
from tests.cases import case
from tests.mirroring.in_process import Mirror


@pytest.fixture
def steps() -> CheckedSteps:
    return CheckedSteps("this TestStrategy")


def made(steps: CheckedSteps, make: Callable[[], Any] = lambda: nn.Linear(1, 1)) -> Any:
    with steps.scope.enter():
        return make()


class Trainer:
    """Holds a model as programs do."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.nested = {"models": [model]}

    def step(self) -> bool:
        return self.model.training


OUTSIDE: dict[str, Callable[[nn.Module], Any]] = {
    "closure": lambda model: lambda: model(torch.ones(1)),
    "default": lambda model: lambda own=model: own(torch.ones(1)),
    "method": lambda model: Trainer(model).step,
    "module": lambda model: model,
    "partial": lambda model: functools.partial(lambda own: own.training, model),
    "list": lambda model: lambda held=[{"x": (model,)}]: held,  # a default that holds it
    "function": lambda model: (lambda inner: lambda: inner())(lambda: model.training),
    "optimizer": lambda model: functools.partial(id, torch.optim.SGD(model.parameters(), lr=1.0)),
    "scheduler": lambda model: functools.partial(
        id, torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=1.0), 1)
    ),
    "compiled function": lambda model: torch.compile(lambda: model(torch.ones(1)), backend="eager"),
    "wrapped": lambda model: functools.wraps(len)(lambda: model(torch.ones(1))),
    "property": lambda model: type("Owner", (), {"step": property(lambda self: model), "__module__": __name__})(),
    "compiled": lambda model: torch.compile(model, backend="eager"),
}


def test_objects_from_outside_the_scope_are_found_in_every_place(steps: CheckedSteps) -> None:
    message = "the scope of this TestStrategy; .*(Linear|SGD|Optimized).* was not"
    for way, reach in OUTSIDE.items():
        inside, outside = made(steps), nn.Linear(1, 1)
        with case(way):
            steps.check(reach(inside), ())
            with pytest.raises(FailedPreconditionError, match=message):
                steps.check(reach(outside), ())
    steps.check(len, (1, made(steps), torch.ones(1)))
    with pytest.raises(FailedPreconditionError, match="parameter 'weight' of module Linear was not"):
        steps.check(len, (nn.Linear(1, 1),))
    model = made(steps, lambda: nn.Sequential(nn.Sequential(nn.ReLU())))
    model[0].append(nn.Linear(1, 1))
    with pytest.raises(FailedPreconditionError, match=r"parameter '0.1.weight' of module Sequential was not"):
        steps.check(lambda: model.training, ())


def run(steps: CheckedSteps, fn: Any, times: int) -> None:
    for _ in range(times):
        steps.check(fn, ())


def test_a_replaced_object_is_found_in_the_next_step(steps: CheckedSteps) -> None:
    model = made(steps)
    trainer = Trainer(model)

    def step() -> bool:
        return bool(model.training)

    for fn in (step, trainer.step):
        run(steps, fn, 5)
    model = trainer.model = nn.Linear(1, 1)
    for fn in (step, trainer.step):
        with pytest.raises(FailedPreconditionError, match="'weight' of module Linear"):
            steps.check(fn, ())
    model = made(steps)
    run(steps, step, 5)


def test_a_replaced_child_or_parameter_is_found_in_the_next_step_and_deep_ones_after_some(steps: CheckedSteps) -> None:
    model = made(steps, lambda: nn.Sequential(nn.Linear(1, 1)))
    deep = made(steps, lambda: nn.Sequential(nn.Sequential(nn.Linear(1, 1))))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step: Callable[[], Any] = lambda: (model.training, optimizer.param_groups)  # noqa: E731
    other: Callable[[], Any] = lambda: deep.training  # noqa: E731
    run(steps, step, 5)
    run(steps, other, 5)
    model[0] = nn.Linear(1, 1)
    with pytest.raises(FailedPreconditionError, match="'0.weight' of module Sequential"):
        steps.check(step, ())
    model[0] = made(steps)
    run(steps, step, 5)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(FailedPreconditionError, match=r"param_groups\[1\] of optimizer SGD"):
        steps.check(step, ())
    deep[0][0] = nn.Linear(1, 1)
    with pytest.raises(FailedPreconditionError, match="'0.0.weight' of module Sequential"):
        run(steps, other, 3)


def test_variables_of_another_strategy_lazy_ones_and_moved_ones(
    steps: CheckedSteps, mirror: Mirror, layer: nn.Linear
) -> None:
    mirror.run(lambda: layer.training)
    with pytest.raises(FailedPreconditionError, match="Linear belongs to another one than this TestStrategy"):
        steps.check(lambda: layer.training, ())
    weight = layer.weight
    with pytest.raises(FailedPreconditionError, match="parameter of shape .* belongs to another one"):
        steps.check(lambda: weight, ())
    lazy = made(steps, lambda: nn.LazyLinear(1))
    with pytest.raises(FailedPreconditionError, match="parameter 'weight' of module LazyLinear is lazy"):
        steps.check(lambda: lazy.training, ())
    lazy(torch.ones(1, 3))
    steps.check(lambda: lazy.training, ())
    lazy.to("meta")
    with pytest.raises(
        FailedPreconditionError, match=r"\(cpu\); parameter 'weight' of module Linear was moved to meta"
    ):
        steps.check(lambda: lazy.training, ())


def test_nothing_is_kept_alive(steps: CheckedSteps) -> None:
    trainers = [Trainer(made(steps))]
    trainers[0].model.owner = trainers[0].step  # type: ignore[assignment]  # a circle
    steps.check(trainers[0].step, ())
    steps.check(lambda: trainers, ())
    assert len(steps._checked) == 1
    trainers.clear()
    gc.collect()
    assert steps._checked == {}
