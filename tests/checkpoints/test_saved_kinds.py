"""Each kind of object that training has: what comes back is what was saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

import raydist as rd
from raydist.checkpoints.entries import pack_state
from raydist.checkpoints.saved_kinds import state_of


def tensors_of(obj: Any) -> tuple[Any, dict[str, Any]]:
    modules = {"m": obj} if isinstance(obj, nn.Module) else {}
    packed = pack_state(state_of(obj, modules))
    return packed.values, {name: value.tolist() for name, value in packed.tensors.items()}


def optimizer(make: Callable[..., torch.optim.Optimizer], **settings: Any) -> Callable[[int], torch.optim.Optimizer]:
    def made(steps: int) -> torch.optim.Optimizer:
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2))]
        found = make(parameters, **settings)
        for _ in range(steps):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            found.step(lambda: 1.0)
        return found

    return made


def scheduler(make: Callable[..., Any], *args: Any, **settings: Any) -> Callable[[int], Any]:
    def made(steps: int) -> Any:
        stepped = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
        found = make(stepped, *args, **settings)
        for number in range(steps):
            stepped.step()
            if make is lr_scheduler.ReduceLROnPlateau:
                found.step(1.0 + number)
            else:
                found.step()
        return found

    return made


def sequential(stepped: torch.optim.Optimizer) -> Any:
    parts = [lr_scheduler.LinearLR(stepped), lr_scheduler.CosineAnnealingLR(stepped, 5)]
    return lr_scheduler.SequentialLR(stepped, parts, milestones=[2])


def metric(make: Callable[..., torchmetrics.Metric], *values: Any, **settings: Any) -> Callable[[int], Any]:
    def made(steps: int) -> Any:
        found = make(**settings)
        for _ in range(steps):
            found.update(*values)
        return found

    return made


def averaged(steps: int) -> AveragedModel:
    torch.manual_seed(steps)
    model = nn.Linear(2, 1)
    found = AveragedModel(model)
    for _ in range(steps):
        found.update_parameters(nn.Linear(2, 1))
    return found


def scaler(steps: int) -> torch.amp.GradScaler:
    found = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for _ in range(steps):
        found.scale(torch.ones(1))
        found.update(2.0 ** (5 + steps))
    return found


SCORES = (torch.tensor([0.2, 0.7]), torch.tensor([0, 1]))
MADE: dict[str, Callable[[int], Any]] = {
    "SGD": optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": optimizer(torch.optim.Adam, amsgrad=True),
    "Adam with its rate in a tensor": optimizer(torch.optim.Adam, lr=torch.tensor(0.25)),
    "Adafactor": optimizer(torch.optim.Adafactor),
    "LBFGS": optimizer(torch.optim.LBFGS),
    "MultiStepLR": scheduler(lr_scheduler.MultiStepLR, [1, 3]),
    "OneCycleLR": scheduler(lr_scheduler.OneCycleLR, 0.5, total_steps=20),
    "ReduceLROnPlateau": scheduler(lr_scheduler.ReduceLROnPlateau, patience=1),
    "CosineAnnealingWarmRestarts": scheduler(lr_scheduler.CosineAnnealingWarmRestarts, 3),
    "CyclicLR": scheduler(lr_scheduler.CyclicLR, 0.1, 0.5),
    "LambdaLR": scheduler(lr_scheduler.LambdaLR, lambda epoch: 0.9**epoch),
    "SequentialLR": scheduler(sequential),
    "a metric of sums": metric(torchmetrics.MeanMetric, 3.0),
    "a metric of lists": metric(torchmetrics.CatMetric, torch.tensor([1.0, 2.0])),
    "a metric of curves": metric(torchmetrics.AUROC, *SCORES, task="binary"),
    "rd.Mean": metric(rd.Mean, 3.0),
    "AveragedModel": averaged,
    "GradScaler": scaler,
}


@pytest.mark.parametrize("kind", MADE)
def test_it_comes_back(kind: str, tmp_path: Path) -> None:
    saved, other = MADE[kind](4), MADE[kind](0)
    path = rd.Checkpoint(it=saved).save(tmp_path / "x")
    expected = tensors_of(saved)
    assert tensors_of(other) != expected
    rd.Checkpoint(it=other).restore(path)
    assert tensors_of(other) == expected
    assert str(other.state_dict()) == str(saved.state_dict())
    if isinstance(saved, torchmetrics.Metric):
        assert float(torch.sum(other.compute())) == float(torch.sum(saved.compute()))


def test_a_position_in_a_dataset(tmp_path: Path) -> None:
    numbers = rd.Dataset.range(20).shuffle(20, seed=3).batch(3)
    iterator = iter(numbers)
    for _ in range(3):
        next(iterator)
    path = rd.Checkpoint(data=iterator).save(tmp_path / "x")
    expected = [batch.tolist() for batch in iterator]
    again = iter(numbers)
    next(again)
    rd.Checkpoint(data=again).restore(path)
    assert [batch.tolist() for batch in again] == expected
    other = iter(rd.Dataset.range(20).batch(2))
    with pytest.raises(rd.InvalidArgumentError):
        rd.Checkpoint(data=other).restore(path)
    other.close()


def test_a_metric_in_a_module_computes_what_was_restored(tmp_path: Path) -> None:
    model: Any = nn.ModuleDict({"mean": torchmetrics.MeanMetric()})
    model["mean"].persistent(True)
    checkpoint = rd.Checkpoint(model=model)
    model["mean"].update(1.0)
    checkpoint.save(tmp_path / "saved")
    model["mean"].update(3.0)
    assert float(model["mean"].compute()) == 2.0
    checkpoint.restore(tmp_path / "saved")
    assert float(model["mean"].compute()) == 1.0
