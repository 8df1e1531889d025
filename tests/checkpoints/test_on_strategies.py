"""A checkpoint of any strategy restores on any other one: stored tensors exactly, and training goes on alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import raydist as rd

Maker = Callable[[], rd.Strategy]

ROWS = 12

ROW = torch.arange(4, dtype=torch.float64)


class Run:
    """A model and what belongs to it, under a strategy."""

    def __init__(self, strategy: rd.Strategy, seed: int = 0) -> None:
        self.strategy = strategy
        with strategy.scope():
            torch.manual_seed(seed)
            self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
            self.mean = rd.Mean()
        self.progress = rd.State(step=0)
        self.checkpoint = rd.Checkpoint(**self.checkpoint_objects())

    def checkpoint_objects(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "mean": self.mean,
            "progress": self.progress,
        }

    def train(self, steps: int) -> None:
        model, optimizer, mean = self.model, self.optimizer, self.mean

        def step(x: torch.Tensor) -> None:
            loss = (model(x) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean.update(loss.detach(), weight=len(x))

        first = self.progress.step
        rows = rd.Dataset.range(first * ROWS, (first + steps) * ROWS).map(
            lambda i: torch.sin(torch.arange(4, dtype=torch.float64) + float(i))
        )
        for batch in self.strategy.distribute_dataset(rows.batch(ROWS)):
            self.strategy.run(step, args=(batch,))
            self.scheduler.step()
            self.progress.step += 1

    def values(self) -> dict[str, torch.Tensor]:
        return {
            **{name: value.detach().clone() for name, value in self.model.state_dict().items()},
            "lr": torch.tensor(self.optimizer.param_groups[0]["lr"]),
            "mean": self.mean.compute(),
        }


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=name)


class Saved(NamedTuple):
    """Of a run on two replicas, after 3 steps; and what became of it."""

    path: Path
    values: dict[str, torch.Tensor]
    later: dict[str, torch.Tensor]


def saved_by(strategy: rd.Strategy, path: Path, more: int) -> Saved:
    run = Run(strategy)
    run.train(3)
    run.checkpoint.save(path)
    values = run.values()
    run.train(more)
    return Saved(path, values, run.values())


@pytest.fixture(scope="module")
def saved(mirrored: Callable[[int], rd.MirroredStrategy], tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return saved_by(mirrored(2), tmp_path_factory.mktemp("saved") / "ckpt-3", more=5)


def whole(file: Path) -> dict[str, torch.Tensor]:
    """Without what each replica has added to a metric: another number of them adds in another way."""
    return {name: value for name, value in load_file(file).items() if not name.startswith("_shares.")}


def check_it_goes_on(strategy: rd.Strategy, saved: Saved, folder: Path, *, more: int, same: bool) -> None:
    """`same`: on as many replicas, so that not a bit may differ."""
    run = Run(strategy, seed=7)
    run.checkpoint.restore(saved.path)
    assert_close(run.values(), saved.values, 0 if same else 1e-12)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    plain.load_state_dict(load_file(saved.path / "model.safetensors"))  # by torch and safetensors alone
    torch.testing.assert_close(run.model(ROW), plain(ROW), rtol=0, atol=0)
    run.checkpoint.save(folder)  # nothing was lost on the way
    for file in ("model.safetensors", "optimizer.safetensors", "mean.safetensors"):
        found, stored = whole(folder / file), whole(saved.path / file)
        assert found.keys() == stored.keys()
        assert_close(found, stored, 0)
    run.train(more)
    assert run.progress.step == 3 + more
    assert_close(run.values(), saved.later, 0 if same else 1e-9)


@pytest.mark.ray
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["one", "mirrored", pytest.param("central", marks=pytest.mark.long), "served"])
def test_a_checkpoint_resumes_under_any_strategy(
    kind: str,
    saved: Saved,
    tmp_path: Path,
    mirrored: Callable[[int], rd.MirroredStrategy],
    central: Callable[[int], rd.CentralStorageStrategy],
    served: Callable[[int], rd.ParameterServerStrategy],
) -> None:
    makers: dict[str, Maker] = {
        "one": lambda: rd.OneDeviceStrategy("cpu"),
        "mirrored": lambda: mirrored(2),
        "central": lambda: central(2),
        "served": lambda: served(1),
    }
    check_it_goes_on(makers[kind](), saved, tmp_path / "again", more=5, same=kind == "mirrored")


LIMITS = rd.Timeouts(start_s=60, collective_s=20, step_s=40, input_s=30, close_s=5)

SHARE: dict[str, Any] = {"resources_per_replica": {"CPU": 0.01}, "timeouts": LIMITS}

SERVERS: dict[str, Any] = {**SHARE, "resources_per_server": {"CPU": 0.01}}

MAKERS: dict[str, Maker] = {
    "one": lambda: rd.OneDeviceStrategy("cpu"),
    "mirrored 1": lambda: rd.MirroredStrategy(1, **SHARE),
    "mirrored 2": lambda: rd.MirroredStrategy(2, **SHARE),
    "mirrored 3": lambda: rd.MirroredStrategy(3, **SHARE),
    "mirrored 4": lambda: rd.MirroredStrategy(4, **SHARE),
    "workers": lambda: rd.MultiWorkerMirroredStrategy(2, 1, **SHARE),
    "central": lambda: rd.CentralStorageStrategy(2, **SHARE),
    "served 1": lambda: rd.ParameterServerStrategy(1, 1, **SERVERS),
    "served 3": lambda: rd.ParameterServerStrategy(1, 3, variable_partitioner=rd.FixedShardsPartitioner(3), **SERVERS),
}


OTHERS = ("mirrored 1", "served 1")


@pytest.mark.ray
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["one", *(pytest.param(kind, marks=pytest.mark.long) for kind in OTHERS)])
def test_variables_of_a_closed_strategy_are_saved_and_restored(ray_cluster: None, kind: str, tmp_path: Path) -> None:
    with MAKERS[kind]() as strategy:
        run = Run(strategy)
        data = strategy.distribute_dataset(rd.Dataset.range(6).batch(2))
        iterator = iter(data)
        next(iterator)
        run.train(2)
        expected = run.values()
    checkpoint = rd.Checkpoint(run=run.checkpoint_objects(), data=data)
    with rd.CheckpointManager(checkpoint, tmp_path, 1) as manager:
        handle = manager.save()
        assert handle is not None
        handle.wait()
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.zero_()
        assert manager.restore_or_initialize() == handle.path
    assert_close(run.values(), expected, 0)
    other = Run(rd.OneDeviceStrategy("cpu"), seed=7)
    again = other.strategy.distribute_dataset(rd.Dataset.range(6).batch(2))
    rd.Checkpoint(run=other.checkpoint_objects(), data=again).restore(handle.path)
    assert_close(other.values(), expected, 0)
    assert [batch.tolist() for batch in again] == [[2, 3], [4, 5]]


@pytest.fixture(scope="module")
def saved_anywhere(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    """By strategy, a checkpoint of it, and what became of that run."""
    folder = tmp_path_factory.mktemp("anywhere")
    found: dict[str, Saved] = {}
    for name in ("one", "mirrored 2", "mirrored 3", "central", "served 3"):
        with MAKERS[name]() as strategy:
            found[name] = saved_by(strategy, folder / name, more=50)
    return found


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("target", MAKERS)
def test_every_strategy_restores_checkpoints_of_every_other(
    target: str, saved_anywhere: dict[str, Saved], tmp_path: Path
) -> None:
    """1 to 4 replicas, two workers, one copy for all, 1 and 3 parameter servers; 50 further steps."""
    with MAKERS[target]() as strategy:
        for source, saved in saved_anywhere.items():
            check_it_goes_on(strategy, saved, tmp_path / source, more=50, same=target == source)
