"""The objects of a checkpoint, and the state of each kind."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

import raydist as rd
from raydist.checkpoints.entries import pack_state
from raydist.checkpoints.object_state import (
    PendingGradients,
    aliases_of,
    has_state,
    named_objects,
    state_of,
    states_by_rank,
)


class Owner:
    """Mirrors a metric over some replicas."""

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas

    def states_by_rank(self, metric: rd.Mean) -> list[dict[str, object]]:
        return [{"total": rank} for rank in range(self._num_replicas)]


def test_shares_are_those_of_several_replicas() -> None:
    for num_replicas, expected in [(1, 0), (2, 2)]:
        metric = rd.Mean()
        kind = type("Mirrored", (rd.Mean,), {"_raydist_owner": Owner(num_replicas)})
        metric.__class__ = kind
        assert len(states_by_rank(metric)) == expected
    assert states_by_rank(rd.Mean()) == []


def test_values_are_attributes() -> None:
    progress = rd.State(epoch=0, best=float("inf"), seen={"a": [1, None, True]})
    progress.epoch += 2
    progress.new = "x"
    assert progress.state_dict() == {"epoch": 2, "best": float("inf"), "seen": {"a": [1, None, True]}, "new": "x"}
    assert repr(rd.State(a=1)) == "State(a=1)"


def test_a_state_is_taken_over() -> None:
    progress = rd.State(epoch=0, best=0.5)
    progress.load_state_dict({"epoch": 3, "more": [1]})
    assert (progress.epoch, progress.best, progress.more) == (3, 0.5, [1])


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (torch.ones(1), "'x'"),
        (np.float64(1), "'x'"),
        ((1, 2), "'x'"),
        ({"a": [1, {2: 3}]}, "'x.a.1'"),
        ([print], "'x.0'"),
        (b"", "'x'"),
        (1j, "'x'"),
    ],
)
def test_what_is_no_json_value_is_named(value: Any, named: str) -> None:
    progress = rd.State(x=0)
    with pytest.raises(rd.InvalidArgumentError, match=named):
        rd.State(x=value)
    with pytest.raises(rd.InvalidArgumentError, match=named):
        progress.x = value
    with pytest.raises(rd.InvalidArgumentError, match=named):
        progress.load_state_dict({"epoch": 1, "x": value})
    assert progress.state_dict() == {"x": 0}


def test_what_was_put_into_a_list_later_is_found() -> None:
    progress = rd.State(seen=[])
    progress.seen.append(print)
    with pytest.raises(rd.InvalidArgumentError, match="'seen.0'"):
        progress.state_dict()


def test_a_list_in_itself_is_found() -> None:
    seen: list[Any] = []
    seen.append(seen)
    with pytest.raises(rd.InvalidArgumentError, match="levels deep"):
        rd.State(seen=seen)


@pytest.mark.parametrize("name", ["_hidden", "state_dict", "load_state_dict"])
def test_names_that_are_taken(name: str) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=f"'{name}'"):
        rd.State(**{name: 1})


def test_an_unknown_name_is_told() -> None:
    with pytest.raises(AttributeError, match=r"\['epoch'\], and no 'epoche'"):
        _ = rd.State(epoch=0).epoche


def test_it_can_be_copied_and_sent() -> None:
    progress = rd.State(epoch=3)
    assert pickle.loads(pickle.dumps(progress)).epoch == copy.deepcopy(progress).epoch == 3


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


def test_dicts_and_lists_are_gone_through() -> None:
    a, b, c = rd.State(), torch.nn.Linear(1, 1), torch.nn.ModuleList([torch.nn.Linear(1, 1)])
    assert named_objects({"a": a, "more": {"b": [b, (c,)], 7: a}, "none": []}) == {
        "a": a,
        "more.b.0": b,
        "more.b.1.0": c,
        "more.7": a,
    }


def test_two_objects_of_one_name() -> None:
    with pytest.raises(rd.InvalidArgumentError, match=r"two are called 'x\.a\.b'"):
        named_objects({"x": {"a.b": rd.State(), "a": {"b": rd.State()}}})


def test_keys_are_names() -> None:
    with pytest.raises(rd.InvalidArgumentError, match=r"got \(1, 2\) in 'x'"):
        named_objects({"x": {(1, 2): rd.State()}})


def test_a_list_in_itself() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(rd.InvalidArgumentError, match="state_dict"):
        named_objects({"x": endless})


def test_a_class_has_no_state() -> None:
    assert not has_state(torch.nn.Linear)
    assert has_state(torch.amp.GradScaler("cpu"))


def test_names_of_the_same() -> None:
    a = rd.State()
    assert aliases_of({"a": a, "b": rd.State(), "c": a, "d": a}) == {"c": "a", "d": "a"}


def model_with_gradients() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0](torch.ones(2)).sum().backward()
    return model


def test_gradients_are_part_of_it_when_asked(tmp_path: Path) -> None:
    model = model_with_gradients()
    path = rd.Checkpoint(model=model, gradients=True).save(tmp_path / "x")
    again = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    again[1](torch.ones(2)).sum().backward()
    rd.Checkpoint(model=again, gradients=True).restore(path)
    for here, there in zip(again.parameters(), model.parameters(), strict=True):
        assert (here.grad is None) == (there.grad is None)
        assert here.grad is None or (there.grad is not None and torch.equal(here.grad, there.grad))


def test_and_not_otherwise(tmp_path: Path) -> None:
    path = rd.Checkpoint(model=model_with_gradients()).save(tmp_path / "x")
    assert sorted(each.name for each in Path(path).iterdir()) == ["manifest.json", "model.safetensors"]


def test_of_another_shape() -> None:
    model = model_with_gradients()
    with pytest.raises(rd.InvalidArgumentError, match="'0.weight' of shape \\(3,\\)"):
        PendingGradients(model).load_state_dict({"0.bias": torch.ones(2), "0.weight": torch.ones(3)})
    assert set(PendingGradients(model).state_dict()) == {"0.weight", "0.bias"}
