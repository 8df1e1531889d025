"""`rd.Checkpoint`: what is saved comes back, in this process, in another one, and without raydist."""

from __future__ import annotations

import itertools
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from safetensors.torch import load_file
from torch import nn
from torchmetrics.classification import BinaryPrecision, BinaryRecall

import raydist as rd
from tests.refused import check_refused

pytestmark = pytest.mark.usefixtures("no_strategies")


class Everything:
    """One of each kind of object, trained a little."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 8)
        self.model = nn.Sequential(self.first, nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2)).double()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, milestones=[2, 5])
        self.metric = torchmetrics.MeanMetric()
        self.mean = rd.Mean()
        self.progress = rd.State(epoch=0, best=float("-inf"), history=[])
        self.checkpoint = rd.Checkpoint(
            model=self.model,
            optimizer=self.optimizer,
            more={"scheduler": self.scheduler, 7: (self.metric, self.mean)},
            progress=self.progress,
        )

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            x = torch.randn(16, 4, dtype=torch.float64)
            loss = (self.model(x) ** 2).mean() * float(np.random.rand() + random.random())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.metric.update(loss.item())
            self.mean.update(loss.item(), weight=16)
            self.progress.epoch += 1
            self.progress.history.append(loss.item())
            losses.append(loss.item())
        return [*losses, float(self.metric.compute()), float(self.mean.compute())]


def test_a_resumed_run_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    run = Everything()
    run.train(3)
    path = run.checkpoint.save(tmp_path / "ckpt-3")
    expected = run.train(7)
    again = Everything(seed=5)
    again.train(1)
    assert again.checkpoint.restore(path).missing == ()
    assert again.train(7) == expected
    assert again.progress.state_dict() == run.progress.state_dict()
    assert [group["lr"] for group in again.optimizer.param_groups] == [g["lr"] for g in run.optimizer.param_groups]
    for name, value in run.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value)


def test_other_users_can_read_the_files_and_the_next_save_replaces_them(tmp_path: Path) -> None:
    run = Everything()
    run.train(2)
    path = run.checkpoint.save(tmp_path / "x")
    fresh = Everything(seed=9)
    fresh.model.load_state_dict(load_file(f"{path}/model.safetensors"))
    for name, value in run.model.state_dict().items():
        assert torch.equal(fresh.model.state_dict()[name], value)
    saved = load_file(f"{path}/optimizer.safetensors")
    assert torch.equal(saved["0.weight.exp_avg"], run.optimizer.state[run.first.weight]["exp_avg"])
    assert json.loads(Path(path, "manifest.json").read_text())["saved"]["version"] == 1
    run.train(1)
    run.checkpoint.save(path)
    fresh.checkpoint.restore(path)
    assert fresh.progress.epoch == 3
    assert len(os.listdir(path)) == 5  # nothing of the first is left


def test_an_object_with_two_names_is_stored_once(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    path = rd.Checkpoint(a=model, b=model).save(tmp_path / "x")
    assert sorted(os.listdir(path)) == ["a.safetensors", "manifest.json"]
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    nn.init.zeros_(model.weight)
    rd.Checkpoint(a=model, b=model).restore(path)
    assert torch.equal(model.weight, kept["weight"])
    other = nn.Linear(2, 2)
    rd.Checkpoint(b=other).restore(path, strict=False)
    assert torch.equal(other.weight, kept["weight"])


def test_objects_without_state_are_named() -> None:
    things: list[Any] = [3, "text", lambda: 0, nn.Linear, object()]
    cases = [(each, "'more.1'.*rd.State") for each in things]
    check_refused(lambda thing: rd.Checkpoint(more=[rd.State(), thing]), cases)


def test_all_mismatches_are_listed_and_nothing_changes(tmp_path: Path) -> None:
    path = rd.Checkpoint(
        progress=rd.State(a=1), model=nn.ModuleDict({"x": nn.Linear(2, 2), "y": nn.Linear(3, 2)})
    ).save(tmp_path / "x")
    model = nn.ModuleDict({"x": nn.Linear(2, 2).double(), "y": nn.Linear(2, 2), "z": nn.Linear(1, 1)})
    progress = rd.State(a=5, b=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(rd.InvalidArgumentError) as raised:
        rd.Checkpoint(model=model, progress=progress, extra=rd.State()).restore(path)
    for told in (
        "'model.z.weight' is missing",
        "'model.y.weight' is reshaped ((2, 2) here, (2, 3) saved)",
        "'model.x.bias' is retyped (torch.float64 here, torch.float32 saved)",
        "'progress.b' is missing",
        "'extra' is missing",
    ):
        assert told in str(raised.value)
    assert progress.a == 5
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    path = rd.Checkpoint(progress=rd.State()).save(tmp_path / "y")
    with pytest.raises(rd.InvalidArgumentError, match="'progress.v19' is missing, and 5 more"):
        rd.Checkpoint(progress=rd.State(**{f"v{i}": i for i in range(25)})).restore(path)


def test_missing_and_unexpected_names_can_be_allowed(tmp_path: Path) -> None:
    path = rd.Checkpoint(model=nn.ModuleDict({"x": nn.Linear(2, 2)}), old=rd.State()).save(tmp_path / "x")
    model = nn.ModuleDict({"x": nn.Linear(2, 2, bias=False), "z": nn.Linear(1, 1, bias=False)})
    report = rd.Checkpoint(model=model, new=rd.State(a=1)).restore(path, strict=False)
    assert report.missing == ("model.z.weight", "new")
    assert report.unexpected == ("model.x.bias", "old")
    assert torch.equal(model.state_dict()["x.weight"], load_file(f"{path}/model.safetensors")["x.weight"])


def test_restoring_some_objects(tmp_path: Path) -> None:
    run = Everything()
    run.train(2)
    path = run.checkpoint.save(tmp_path / "x")
    again = Everything(seed=4)
    random_state = torch.get_rng_state()
    again.checkpoint.restore(path, only=["model", "more"])
    assert torch.equal(again.first.weight, run.first.weight)
    assert again.scheduler.last_epoch == 2
    assert again.progress.epoch == 0
    assert torch.equal(torch.get_rng_state(), random_state)
    with pytest.raises(rd.InvalidArgumentError, match="'modell'"):
        again.checkpoint.restore(path, only="modell")


def test_an_optimizer_finds_its_parameters_by_name(tmp_path: Path) -> None:
    run = Everything()
    run.train(2)
    path = run.checkpoint.save(tmp_path / "x")
    model = Everything(seed=1).model
    optimizer = torch.optim.AdamW(reversed(list(model.parameters())), lr=1.0)
    rd.Checkpoint(model=model, optimizer=optimizer).restore(path, only=["model", "optimizer"])
    for (_, here), (_, there) in zip(model.named_parameters(), run.model.named_parameters(), strict=True):
        assert torch.equal(optimizer.state[here]["exp_avg"], run.optimizer.state[there]["exp_avg"])
    cases = [
        (torch.optim.AdamW(list(model.parameters())[:2]), "'optimizer.1.weight' is unexpected"),
        (torch.optim.SGD(model.parameters()), "optimizer SGD here, optimizer AdamW saved"),
    ]
    only = ["model", "optimizer"]
    check_refused(lambda other: rd.Checkpoint(model=model, optimizer=other).restore(path, only=only), cases)


def test_an_optimizer_can_restore_the_states_of_some_parameters(tmp_path: Path) -> None:
    def made(sizes: tuple[int, ...], rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(*(nn.Linear(size, after) for size, after in itertools.pairwise(sizes)))
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return model, optimizer

    saved_model, saved = made((2, 3, 1), 0.5)
    saved.step()
    path = rd.Checkpoint(model=saved_model, optimizer=saved).save(tmp_path / "x")
    there = dict(saved_model.named_parameters())
    for sizes in ((2, 3), (2, 3, 1, 1)):
        model, optimizer = made(sizes, 0.25)
        rd.Checkpoint(model=model, optimizer=optimizer).restore(path, strict=False)
        for name, parameter in model.named_parameters():
            assert optimizer.state[parameter]["step"] == (2 if name in there else 1), name
            if name in there:
                assert torch.equal(optimizer.state[parameter]["exp_avg"], saved.state[there[name]]["exp_avg"]), name
        assert optimizer.param_groups[0]["lr"] == 0.5
        optimizer.step()


def test_a_metric_collection_is_saved_as_its_metrics(tmp_path: Path) -> None:
    def made() -> torchmetrics.MetricCollection:
        return torchmetrics.MetricCollection({"p": BinaryPrecision(), "r": BinaryRecall()}, prefix="x_")

    found, again = made(), made()
    found.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 0, 1]))
    path = rd.Checkpoint(metrics=found).save(tmp_path / "x")
    rd.Checkpoint(metrics=again).restore(path)
    for _ in range(2):
        assert again.compute() == found.compute()
        for each in (found, again):
            each.update(torch.tensor([0.6, 0.7]), torch.tensor([1, 0]))


def views() -> list[tuple[Any, Any]]:
    return [
        (torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2, dtype=torch.complex64)),
        (torch.ones(2, dtype=torch.complex64).conj().imag, torch.zeros(2)),
        (torch.arange(6.0).reshape(2, 3).T, torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]])),
        (np.arange(6).reshape(2, 3)[:, ::-1], np.array([[2, 1, 0], [5, 4, 3]])),
        (np.zeros(3, [("a", "i1"), ("b", "f4")])["b"], np.zeros(3, "f4")),
    ]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_has_the_elements_of_views_at_its_call(asynchronous: bool, tmp_path: Path) -> None:
    held = Holder({str(number): value for number, (value, _) in enumerate(views())})
    with rd.CheckpointManager(rd.Checkpoint(held=held), tmp_path, 1, asynchronous=asynchronous) as manager:
        manager.save()
        for value in held.state.values():
            value[...] = 7
        manager.sync()
        manager.restore_or_initialize()
    for found, (_, expected) in zip(held.state.values(), views(), strict=True):
        assert type(found) is type(expected)
        assert np.array_equal(np.asarray(found), np.asarray(expected)), expected


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Lazy modules are a new feature")
def test_tensors_without_values_are_named(tmp_path: Path) -> None:
    cases: list[tuple[Any, str]] = [
        (nn.LazyLinear(2), r"'held.weight' has none yet: it is made by its module's first forward"),
        (nn.Linear(1, 1, device="meta"), r"'held.weight' has none yet: it is on the device 'meta'"),
        (Holder({"x": torch.nested.nested_tensor([torch.ones(2)])}), r"the entry 'held.x' is a torch.Tensor"),
        (Holder({"x": np.ma.masked_array([1], mask=[True])}), r"the entry 'held.x' is a numpy.ma.MaskedArray"),
        (Holder({"x": 10**5000}), r"the entry 'held.x' is a builtins.int of 16610 bits"),
    ]
    check_refused(lambda held: rd.Checkpoint(held=held).save(tmp_path / "x"), cases)
    assert os.listdir(tmp_path) == []


class Holder:
    """Has a state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_an_object_that_rejects_its_state_leaves_all_unchanged(tmp_path: Path) -> None:
    class Picky:
        refuses = False

        def state_dict(self) -> dict[str, Any]:
            return {"x": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if self.refuses:
                raise KeyError("pipeline")

    model, progress, picky = nn.Linear(1, 1), rd.State(a=1), Picky()
    checkpoint = rd.Checkpoint(progress=progress, model=model, picky=picky)
    path = checkpoint.save(tmp_path / "x")
    progress.a = 7
    before = model.weight.detach().clone().fill_(3)
    with torch.no_grad():
        model.weight.fill_(3)
    picky.refuses = True
    with pytest.raises(rd.InvalidArgumentError, match="'picky'.*Picky"):
        checkpoint.restore(path)
    assert progress.a == 7
    assert torch.equal(model.weight, before)


def test_errors_of_a_missing_checkpoint_and_of_a_save_inside_a_step(tmp_path: Path) -> None:
    checkpoint = rd.Checkpoint(a=rd.State())
    with pytest.raises(rd.NotFoundError, match="did not come to its end"):
        checkpoint.restore(tmp_path / "nothing")
    with pytest.raises(rd.FailedPreconditionError, match="inside of strategy.run"):
        rd.OneDeviceStrategy("cpu").run(lambda: checkpoint.save(tmp_path / "x"))


def test_a_checkpoint_of_a_compiled_module_loads_into_a_plain_one_and_back(tmp_path: Path) -> None:
    def made(compiled: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        block: Any = nn.Linear(2, 2)
        inner: Any = torch.compile(block, backend="eager") if compiled else block
        module: Any = nn.Sequential(nn.Linear(2, 2), inner)
        module = torch.compile(module, backend="eager") if compiled else module
        return module, torch.optim.Adam(module.parameters(), lr=0.1)

    for compiled in (True, False):
        module, optimizer = made(compiled)
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        path = str(tmp_path / f"{compiled}")
        rd.Checkpoint(gradients=True, model=module, optimizer=optimizer).save(path)
        assert sorted(load_file(f"{path}/model.safetensors")) == ["0.bias", "0.weight", "1.bias", "1.weight"]
        other, its = made(not compiled)
        rd.Checkpoint(gradients=True, model=other, optimizer=its).restore(path)
        for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, theirs)
            assert torch.equal(optimizer.state[mine]["exp_avg"], its.state[theirs]["exp_avg"])
            assert mine.grad is not None
            assert theirs.grad is not None


def test_names_of_compiled_modules_in_older_checkpoints_still_load(tmp_path: Path, monkeypatch: Any) -> None:
    """Version 0.1 saved them as torch names them."""
    module: Any = torch.compile(nn.Linear(2, 1), backend="eager")
    with monkeypatch.context() as old:
        old.setattr("raydist.checkpoints.object_state.has_compiled", lambda module: False)
        old.setattr("raydist.checkpoints.parameter_names.plain_name", lambda name: name)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        rd.Checkpoint(model=module, optimizer=optimizer).save(tmp_path / "old")
    assert "_orig_mod.weight" in load_file(tmp_path / "old" / "model.safetensors")
    others: list[Any] = [nn.Linear(2, 1), torch.compile(nn.Linear(2, 1), backend="eager")]
    for other in others:
        its = torch.optim.SGD(other.parameters(), lr=0.5, momentum=0.9)
        rd.Checkpoint(model=other, optimizer=its).restore(tmp_path / "old")
        assert all(torch.equal(*pair) for pair in zip(other.parameters(), module.parameters(), strict=True))
        assert len(its.state) == 2


def test_a_model_is_saved_as_module_optimizer_scheduler_and_metrics(tmp_path: Path) -> None:
    def made() -> rd.Model:
        model = rd.Model(nn.Linear(1, 1))
        model.compile("adam", "mse", metrics={"mean": torchmetrics.MeanSquaredError()})
        return model

    def weight(of: rd.Model) -> torch.Tensor:
        return next(of.parameters()).detach()

    x = torch.arange(4.0)[:, None]
    later = rd.Model(nn.Linear(1, 1))
    checkpoint = rd.Checkpoint(model=later)
    assert repr(checkpoint) == "Checkpoint(model)"
    later.compile("sgd", "mse")
    assert repr(checkpoint) == "Checkpoint(model, model.optimizer)"
    model, other = made(), made()
    checkpoint = rd.Checkpoint(model=model)
    model.fit(x, 2 * x, batch_size=2, verbose=False)
    checkpoint.save(tmp_path / "c")
    assert repr(checkpoint) == "Checkpoint(model, model.optimizer, model.metrics.mean)"
    rd.Checkpoint(model=other).restore(tmp_path / "c")
    assert torch.equal(weight(model), weight(other))
    assert len(other.optimizer.state) == 2
    assert float(other.metrics["mean"].compute()) == float(model.metrics["mean"].compute()) > 0
    plain = nn.Linear(1, 1)
    plain.load_state_dict(load_file(tmp_path / "c" / "model.safetensors"))
    assert torch.equal(plain.weight, weight(model))
