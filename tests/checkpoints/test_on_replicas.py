"""Saves and restores under strategies with replicas: steps do not wait for a save, and replicas read what they hold."""

from __future__ import annotations

import functools
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import raydist as rd
from raydist.checkpoints import checkpoint as saving
from raydist.checkpoints import read_tensors
from raydist.checkpoints.shards import ShardTerms
from raydist.replicas.replica_states import ReplicaRestorer
from tests.summary.reading import curves

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


class Layers(torch.nn.Module):
    """Large enough that replicas divide it, if they are told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.nn.functional.dropout(layer(x), 0.3)
        return x


def made(strategy: rd.Strategy) -> tuple[Any, Any, Any]:
    torch.manual_seed(5)
    with strategy.scope():
        model = Layers()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(go: str | None = None) -> None:
        while go is not None and not Path(go).exists():
            time.sleep(0.01)
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()

    return model, optimizer, step


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def saved_between(strategy: rd.Strategy, step: Any, manager: rd.CheckpointManager, go: Path) -> Path:
    """The checkpoint of a save that is asked for while a step stands still, with another step behind it."""
    strategy.run(step, args=(str(go),))
    handle = manager.save()
    strategy.run(step)
    assert handle is not None
    assert not handle.done()
    go.touch()
    handle.wait()
    return Path(handle.path)


def test_a_save_does_not_wait_for_dispatched_steps_and_contains_them(two: rd.Strategy, tmp_path: Path) -> None:
    model, optimizer, step = made(two)
    two.run(step)
    with rd.CheckpointManager(rd.Checkpoint(model=model, optimizer=optimizer), tmp_path / "run", None) as manager:
        path = saved_between(two, step, manager, tmp_path / "go")
    later = values(model)
    saved = load_file(path / "model.safetensors")
    assert any(not torch.equal(saved[name], later[name]) for name in saved)
    rd.Checkpoint(model=model, optimizer=optimizer).restore(path)
    now = values(model)
    assert all(torch.equal(saved[name], now[name]) for name in saved)
    two.run(step)
    now = values(model)
    assert all(torch.equal(later[name], now[name]) for name in later)


def test_summaries_of_steps_before_a_save_are_written_when_it_commits(two: rd.Strategy, tmp_path: Path) -> None:
    model, _, step = made(two)

    def recording(number: int, go: str | None = None) -> None:
        step(go)
        rd.summary.scalar("loss", float(number), step=number)

    two.run(step)
    writer = rd.summary.create_file_writer(tmp_path / "logs", flush_millis=10**6)
    with rd.CheckpointManager(rd.Checkpoint(model=model), tmp_path / "run", None) as manager, writer.as_default():
        two.run(recording, args=(0,))
        two.run(recording, args=(1, str(tmp_path / "go")))
        handle = manager.save()
        assert handle is not None
        (tmp_path / "go").touch()
        handle.wait()
        assert curves(tmp_path / "logs").scalars("loss") == [(0, 0.0), (1, 1.0)]
    writer.close()


def test_a_save_after_a_failed_step_raises_the_error_of_the_step(two: rd.Strategy, tmp_path: Path) -> None:
    model, optimizer, step = made(two)
    two.run(step)

    def fail() -> None:
        raise ValueError("bad row")

    with rd.CheckpointManager(rd.Checkpoint(model=model, optimizer=optimizer), tmp_path, None) as manager:
        two.run(fail)
        handle = manager.save()
        assert handle is not None
        with pytest.raises(ValueError, match="bad row"):
            handle.wait()
        with pytest.raises(ValueError, match="bad row"):
            two.stats()
        two.run(step)
        manager.save().wait()  # type: ignore[union-attr]  # nothing says that none is due
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt-2"]


def test_replicas_divide_large_tensors_and_merge_their_counts(
    two: rd.Strategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two.scope():
        model = torch.nn.Sequential(torch.nn.Linear(2100, 2100), torch.nn.Linear(2100, 2100))
        norm: Any = torch.nn.BatchNorm1d(2)
        mean = rd.Mean()
    rows = two.distribute_dataset(rd.Dataset.from_tensor_slices(torch.arange(8.0).reshape(4, 2)).batch(4))

    def step(batch: torch.Tensor, go: str | None = None) -> None:
        while go is not None and not Path(go).exists():
            time.sleep(0.01)
        norm(batch)
        mean.update(batch.mean(), weight=len(batch))
        model(torch.ones(1, 2100)).sum().backward()

    for batch in rows:
        two.run(step, args=(batch,))
        two.run(step, args=(batch, str(tmp_path / "go")))
    checkpoint = rd.Checkpoint(model=model, norm=norm, mean=mean)
    with rd.CheckpointManager(checkpoint, tmp_path / "run", 1) as manager:
        handle = manager.save()  # waits for none of these steps
        assert handle is not None
        assert not handle.done()
        (tmp_path / "go").touch()
        handle.wait()
    names = sorted(path.name for path in Path(handle.path).iterdir())
    assert names == [
        "manifest.json",
        "mean.safetensors",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "norm.safetensors",
    ]
    before, statistics, counted = values(model), norm.running_mean.clone(), mean.compute()
    with torch.no_grad():
        for tensor in (*model.parameters(), norm.running_mean):
            tensor.zero_()
    mean.reset()
    checkpoint.restore(handle.path)
    now = values(model)
    assert all(torch.equal(before[name], now[name]) for name in before)
    assert torch.equal(norm.running_mean, statistics)
    assert torch.equal(mean.compute(), counted)


def test_servers_write_their_own_variables_without_waiting_for_steps(
    served: Callable[[int], rd.ParameterServerStrategy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "ShardTerms", functools.partial(ShardTerms, small_bytes=0))
    strategy = served(1)
    model, optimizer, step = made(strategy)
    strategy.run(step)
    checkpoint = rd.Checkpoint(model=model, optimizer=optimizer)
    with rd.CheckpointManager(checkpoint, tmp_path / "run", 1) as manager:
        path = saved_between(strategy, step, manager, tmp_path / "go")
    later = values(model)
    saved = load_file(path / "model.safetensors")
    assert any(not torch.equal(saved[name], later[name]) for name in saved)
    assert load_file(path / "optimizer.safetensors")["layers.0.weight.step"] == 2
    checkpoint.restore(path)
    now = values(model)
    assert all(torch.equal(saved[name], now[name]) for name in saved)
    strategy.run(step)
    assert optimizer.state[model.layers[0].weight]["step"] == 3


class Net(torch.nn.Module):
    """With statistics, and something that replicas add up."""

    rows: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("rows", torch.zeros(()))
        rd.set_aggregation(self, "rows", synchronization="on_read", aggregation="sum")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows.add_(len(x))
        result: torch.Tensor = self.norm(torch.nn.functional.dropout(self.linear(x), 0.3))
        return result


class Run:
    """A program: a model and what belongs to it."""

    def __init__(self, strategy: rd.Strategy, seed: int) -> None:
        self.strategy = strategy
        torch.manual_seed(seed)
        with strategy.scope():
            self.model = Net()
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1 * seed)
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
            self.mean = rd.Mean()
        self.plain = torch.nn.Linear(2, 1)  # the driver's own
        self.checkpoint = rd.Checkpoint(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            mean=self.mean,
        )

    def train(self, steps: int) -> None:
        model, optimizer, mean = self.model, self.optimizer, self.mean

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            mean.update(loss.detach(), weight=len(x))

        rows = torch.arange(24.0).reshape(6, 4).sin()
        for _ in range(steps):
            for batch in self.strategy.distribute_dataset(rd.Dataset.from_tensor_slices(rows).batch(6)):
                self.strategy.run(step, args=(batch,))
            self.scheduler.step()

    def values(self) -> dict[str, torch.Tensor]:
        state = self.optimizer.state_dict()
        moments = {f"{name}.{key}": each for name, part in state["state"].items() for key, each in part.items()}
        rate = torch.tensor(state["param_groups"][0]["lr"])
        found = {**self.model.state_dict(), **moments, "rate": rate, "mean": self.mean.compute()}
        return {name: value.detach().clone() for name, value in found.items()}

    def of_replicas(self) -> list[Any]:
        """What each replica has of it."""
        model, optimizer = self.model, self.optimizer

        def look() -> list[float]:
            tensors = [
                *model.state_dict().values(),
                *(each for part in optimizer.state.values() for each in part.values()),
            ]
            return [float(tensor.double().sum()) for tensor in tensors]

        return list(self.strategy.local_results(self.strategy.run(look)))


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.fixture
def read_by_driver(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files of which this process reads tensors."""
    found: list[str] = []
    original = read_tensors._FileReader._read_piece

    def some(self: Any, size: int, what: str) -> bytes:
        found.append(Path(self._path).name)
        return original(self, size, what)

    monkeypatch.setattr(read_tensors._FileReader, "_read_piece", some)
    return found


@pytest.mark.parametrize("num_steps", [0, 1])
def test_replicas_read_their_own_variables(
    num_steps: int, two: rd.MirroredStrategy, tmp_path: Path, read_by_driver: list[str]
) -> None:
    """Objects that were trained already, and those of a program that begins."""
    first = Run(two, 1)
    first.train(2)
    first.checkpoint.save(tmp_path / "c")
    saved = first.values()
    first.train(2)
    again = Run(two, 2)
    again.train(num_steps)
    count = two.stats().steps
    again.checkpoint.restore(tmp_path / "c")
    assert set(read_by_driver) <= {"mean.safetensors"}
    assert two.stats().steps == count, "a restore is no step"
    assert_same(again.values(), saved)
    again.train(2)
    assert_same(again.values(), first.values(), 1e-6)  # running statistics are their mean on all replicas now


def test_damage_changes_nothing_on_any_replica(two: rd.MirroredStrategy, tmp_path: Path) -> None:
    run = Run(two, 1)
    run.train(1)
    run.checkpoint.save(tmp_path / "c")
    run.train(1)
    values, held = run.values(), run.of_replicas()
    for name in ("model", "optimizer"):
        file = tmp_path / "c" / f"{name}.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        with pytest.raises(rd.DataLossError, match=rf"{name}.safetensors.*tensor '.*' differs"):
            run.checkpoint.restore(tmp_path / "c")
        content[-1] ^= 1
        file.write_bytes(content)
        assert_same(run.values(), values)
        assert run.of_replicas() == held
    run.checkpoint.restore(tmp_path / "c")  # they go on together
    run.train(1)


def test_a_checkpoint_in_memory(two: rd.MirroredStrategy) -> None:
    run = Run(two, 1)
    run.train(1)
    path = run.checkpoint.save(f"memory://{uuid.uuid4().hex}/c")
    saved = run.values()
    run.train(1)
    run.checkpoint.restore(path)
    assert_same(run.values(), saved)


def test_objects_of_the_driver_and_of_replicas_restore_together(
    two: rd.MirroredStrategy, tmp_path: Path, read_by_driver: list[str]
) -> None:
    run = Run(two, 1)
    run.train(1)
    checkpoint = rd.Checkpoint(model=run.model, optimizer=run.optimizer, plain=run.plain)
    checkpoint.save(tmp_path / "c")
    saved, weight = run.values(), run.plain.weight.tolist()
    run.train(1)
    with torch.no_grad():
        run.plain.weight.zero_()
    checkpoint.restore(tmp_path / "c")
    assert set(read_by_driver) == {"optimizer.safetensors", "plain.safetensors"}, "its modules are not all replicas'"
    assert run.plain.weight.tolist() == weight
    found = {**run.values(), "mean": saved["mean"], "rate": saved["rate"]}  # of a metric and a scheduler
    assert_same(found, saved)


@pytest.fixture
def fragile(ray_cluster: None) -> Iterator[rd.MirroredStrategy]:
    """A strategy that a test breaks."""
    limits = rd.Timeouts(start_s=60, collective_s=5, step_s=60, close_s=5)
    made = rd.MirroredStrategy(2, resources_per_replica={"CPU": 0.01}, timeouts=limits)
    yield made
    made._abort(fetch=False)


def test_a_replica_that_dies_after_reading(
    fragile: rd.MirroredStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, progress = Run(fragile, 1), rd.State(step=1)
    checkpoint = rd.Checkpoint(model=run.model, optimizer=run.optimizer, progress=progress)
    run.train(1)
    checkpoint.save(tmp_path / "c")
    progress.step = 2
    process = fragile.local_results(fragile.run(os.getpid))[1]
    original = ReplicaRestorer.commit

    def commit(self: ReplicaRestorer, *args: Any) -> None:
        os.kill(process, signal.SIGKILL)
        original(self, *args)

    monkeypatch.setattr(ReplicaRestorer, "commit", commit)
    with pytest.raises(rd.UnavailableError, match="replica 1 of MirroredStrategy-.* is gone"):
        checkpoint.restore(tmp_path / "c")
    assert progress.step == 2
