"""The objects of a checkpoint, the state of each kind, and the global step."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
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
from raydist.checkpoints.entries import pack_state, unpack_state
from raydist.checkpoints.manifest import open_checkpoint
from raydist.checkpoints.object_state import PendingGradients, named_objects, state_of
from raydist.checkpoints.parameter_names import optimizer_entries, optimizer_state, parameter_names
from raydist.checkpoints.random_state import random_states, set_random_states
from raydist.context import current
from raydist.pipelines.stored.directory_files import directory_files
from tests.refused import check_refused


def test_values_that_are_not_json_are_named() -> None:
    cases: list[tuple[Any, str]] = [
        (torch.ones(1), "'x'"),
        (np.float64(1), "'x'"),
        ((1, 2), "'x'"),
        ({"a": [1, {2: 3}]}, "'x.a.1'"),
        ([print], "'x.0'"),
        (b"", "'x'"),
        (1j, "'x'"),
    ]
    progress = rd.State(x=0)
    check_refused(lambda value: rd.State(x=value), cases)
    check_refused(lambda value: setattr(progress, "x", value), cases)
    check_refused(lambda value: progress.load_state_dict({"epoch": 1, "x": value}), cases)
    assert progress.state_dict() == {"x": 0}
    progress.x = []
    progress.x.append(print)  # is checked later
    check_refused(lambda _: progress.state_dict(), [(None, "'x.0'")])


def endless() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def test_errors_name_the_entry() -> None:
    cases: list[tuple[Any, str]] = [
        ({"seen": endless()}, "levels deep"),
        ({"_hidden": 1}, "'_hidden'"),
        ({"state_dict": 1}, "'state_dict'"),
        ({"load_state_dict": 1}, "'load_state_dict'"),
    ]
    check_refused(lambda values: rd.State(**values), cases)
    cases = [
        ({"a.b": rd.State(), "a": {"b": rd.State()}}, r"two are called 'x\.a\.b'"),
        ({(1, 2): rd.State()}, r"got \(1, 2\) in 'x'"),
        (endless(), "state_dict"),
    ]
    check_refused(lambda objects: named_objects({"x": objects}), cases)
    with pytest.raises(AttributeError, match=r"\['epoch'\], and no 'epoche'"):
        _ = rd.State(epoch=0).epoche
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
    "ReduceLROnPlateau": scheduler(lr_scheduler.ReduceLROnPlateau, patience=1),
    "CosineAnnealingWarmRestarts": scheduler(lr_scheduler.CosineAnnealingWarmRestarts, 3),
    "LambdaLR": scheduler(lr_scheduler.LambdaLR, lambda epoch: 0.9**epoch),
    "SequentialLR": scheduler(sequential),
    "a metric of sums": metric(torchmetrics.MeanMetric, 3.0),
    "a metric of lists": metric(torchmetrics.CatMetric, torch.tensor([1.0, 2.0])),
    "a metric of curves": metric(torchmetrics.AUROC, *SCORES, task="binary"),
    "rd.Mean": metric(rd.Mean, 3.0),
    "AveragedModel": averaged,
    "GradScaler": scaler,
}


def test_objects_of_all_kinds_come_back(tmp_path: Path) -> None:
    for kind, make in MADE.items():
        saved, other = make(4), make(0)
        path = rd.Checkpoint(it=saved).save(tmp_path / kind)
        expected = tensors_of(saved)
        assert tensors_of(other) != expected, kind
        rd.Checkpoint(it=other).restore(path)
        assert tensors_of(other) == expected, kind
        assert str(other.state_dict()) == str(saved.state_dict()), kind
        if isinstance(saved, torchmetrics.Metric):
            assert float(torch.sum(other.compute())) == float(torch.sum(saved.compute())), kind


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


def model_with_gradients() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0](torch.ones(2)).sum().backward()
    return model


def test_gradients_are_saved_on_request(tmp_path: Path) -> None:
    model = model_with_gradients()
    path = rd.Checkpoint(model=model, gradients=True).save(tmp_path / "x")
    again = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    again[1](torch.ones(2)).sum().backward()
    rd.Checkpoint(model=again, gradients=True).restore(path)
    for here, there in zip(again.parameters(), model.parameters(), strict=True):
        assert (here.grad is None) == (there.grad is None)
        assert here.grad is None or (there.grad is not None and torch.equal(here.grad, there.grad))
    with pytest.raises(rd.InvalidArgumentError, match="'0.weight' of shape \\(3,\\)"):
        PendingGradients(model).load_state_dict({"0.bias": torch.ones(2), "0.weight": torch.ones(3)})
    assert set(PendingGradients(model).state_dict()) == {"0.weight", "0.bias"}


def test_optimizer_states_are_named_by_the_modules() -> None:
    a, b = nn.Linear(2, 1), nn.Sequential(nn.Linear(1, 1))
    loose = nn.Parameter(torch.ones(1))
    modules = {"a": a, "b": b}
    assert parameter_names(torch.optim.SGD(b.parameters()), modules) == ["0.weight", "0.bias"]
    both = torch.optim.SGD([{"params": each} for each in ([a.weight], list(b.parameters()))])
    assert parameter_names(both, modules) == ["a.weight", "b.0.weight", "b.0.bias"]
    assert parameter_names(torch.optim.SGD([loose]), modules) == ["0"]
    assert parameter_names(torch.optim.SGD([a.weight, loose]), modules) == ["a.weight", "1"]
    state = {"state": {}, "param_groups": [{"params": [0]}], "rounds": 3}  # an optimizer's own entry
    assert optimizer_state(optimizer_entries(state, ["a"]), ["a"]) == state


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    states = random_states()
    yield
    set_random_states(states)


def draws() -> list[Any]:
    return [torch.rand(3).tolist(), torch.randn(2).tolist(), random.random(), random.gauss(), *np.random.randn(3)]


def test_random_numbers_after_a_restore_are_the_same() -> None:
    draws()
    states = random_states()
    expected = draws()
    draws()
    packed = pack_state(states)
    assert packed.tensors == {}
    set_random_states(unpack_state(packed.values, {}))
    assert draws() == expected


def at_step(count: int) -> tuple[rd.OneDeviceStrategy, rd.Checkpoint]:
    """A program's strategy and checkpoint, as it has trained on so many batches."""
    strategy = rd.OneDeviceStrategy("cpu")
    with strategy.scope():
        checkpoint = rd.Checkpoint(progress=rd.State(epoch=count))
        if count:
            rd.get_global_step()  # made by whoever asks first
        for _ in range(count):
            strategy.run(lambda: rd.get_global_step().add_(1))
    return strategy, checkpoint


def step_of(strategy: rd.OneDeviceStrategy) -> int:
    with strategy.scope():
        return int(rd.get_global_step())


def names_in(path: str) -> list[str]:
    return sorted(open_checkpoint(directory_files(path)).manifest.objects)


def test_the_global_step_is_in_every_checkpoint_of_a_program_that_has_one(tmp_path: Path) -> None:
    path = at_step(3)[1].save(tmp_path / "saved")
    assert names_in(path) == ["global_step", "progress"]
    strategy, fresh = at_step(0)
    fresh.restore(path)
    assert step_of(strategy) == 3
    assert step_of(at_step(0)[0]) == 0, "it is of the one strategy alone"
    path = at_step(0)[1].save(tmp_path / "none")
    assert names_in(path) == ["progress"]
    strategy, counted = at_step(2)
    counted.restore(path)
    assert step_of(strategy) == 2, "there is none to go back to"


def test_an_unused_global_step_is_skipped_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = at_step(3)[1].save(tmp_path / "saved")
    monkeypatch.setattr(current, "_living", set)
    progress = rd.State(epoch=0)
    with pytest.warns(RuntimeWarning, match="Make the Checkpoint under the scope"):
        rd.Checkpoint(progress=progress).restore(path)
    assert progress.epoch == 3


def with_model(count: int) -> tuple[rd.OneDeviceStrategy, rd.Checkpoint]:
    """As `at_step`, but the checkpoint is made outside of the scope and has a module of it."""
    strategy, _ = at_step(count)
    with strategy.scope():
        model = torch.nn.ModuleList([torch.nn.Linear(1, 1)])
    return strategy, rd.Checkpoint(model=model)


def test_the_global_step_is_from_the_strategy_of_the_modules(tmp_path: Path) -> None:
    (one, first), (other, second) = with_model(3), with_model(5)
    assert names_in(first.save(tmp_path / "first")) == ["global_step", "model"]
    second.save(tmp_path / "second")
    again, fresh = with_model(0)
    for path, step in ((tmp_path / "first", 3), (tmp_path / "second", 5)):
        fresh.restore(path)
        assert step_of(again) == step
    assert (step_of(one), step_of(other)) == (3, 5)


def test_a_closed_strategy_restores_the_global_step_it_had(tmp_path: Path) -> None:
    path = with_model(3)[1].save(tmp_path / "saved")
    counted, checkpoint = with_model(1)
    counted.close()
    checkpoint.restore(path)
    assert int(counted._make_counter().value) == 3
    closed, checkpoint = with_model(0)
    closed.close()
    with pytest.raises(
        rd.FailedPreconditionError, match="is closed and can't make its global step, for which nobody asked while"
    ):
        checkpoint.restore(path)
    checkpoint.restore(path, only="model")
