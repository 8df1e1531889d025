"""Saves and restores under strategies with replicas: steps do not wait for a save, and replicas read what they hold."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import raydist as rd
from raydist.checkpoints import read_tensors
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


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], value) for name, value in expected.items())


def test_replicas_read_their_own_variables(two: rd.MirroredStrategy, tmp_path: Path, read_by_driver: list[str]) -> None:
    model, optimizer, step = made(two)
    two.run(step)
    checkpoint = rd.Checkpoint(model=model, optimizer=optimizer)
    checkpoint.save(tmp_path / "c")
    saved = values(model)
    two.run(step)
    later, count = values(model), two.stats().steps
    checkpoint.restore(tmp_path / "c")
    assert two.stats().steps == count, "a restore is no step"
    assert same(values(model), saved)
    path = checkpoint.save(f"memory://{uuid.uuid4().hex}/c")
    two.run(step)
    assert same(values(model), later)
    fresh, its_optimizer, its_step = made(two)  # as a program that begins
    rd.Checkpoint(model=fresh, optimizer=its_optimizer).restore(tmp_path / "c")
    assert same(values(fresh), saved)
    two.run(its_step)
    assert same(values(fresh), later)
    assert not read_by_driver
    checkpoint.restore(path)  # which replicas cannot open
    assert read_by_driver
    assert same(values(model), saved)


def test_damage_changes_nothing_on_any_replica(two: rd.MirroredStrategy, tmp_path: Path) -> None:
    model, optimizer, step = made(two)
    two.run(step)
    checkpoint = rd.Checkpoint(model=model, optimizer=optimizer)
    checkpoint.save(tmp_path / "c")
    saved = values(model)
    two.run(step)

    def look() -> list[float]:
        states = [*model.state_dict().values(), *(each for part in optimizer.state.values() for each in part.values())]
        return [float(tensor.double().sum()) for tensor in states]

    held = two.local_results(two.run(look))
    for name in ("model", "optimizer"):
        file = tmp_path / "c" / f"{name}.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(rd.DataLossError, match=rf"{name}.safetensors.*tensor '.*' differs"):
            checkpoint.restore(tmp_path / "c")
        file.write_bytes(content)
        assert two.local_results(two.run(look)) == held
    checkpoint.restore(tmp_path / "c")  # they go on together
    assert same(values(model), saved)


@pytest.fixture
def fragile(ray_cluster: None) -> Iterator[rd.MirroredStrategy]:
    """A strategy that a test breaks."""
    limits = rd.Timeouts(start_s=60, collective_s=5, step_s=60, close_s=5)
    never = rd.FailureOptions(recover=False)
    made = rd.MirroredStrategy(2, resources_per_replica={"CPU": 0.01}, timeouts=limits, failure_options=never)
    yield made
    made._abort(fetch=False)


@pytest.mark.long
def test_a_replica_that_dies_after_reading(
    fragile: rd.MirroredStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, step = made(fragile)
    progress = rd.State(step=1)
    checkpoint = rd.Checkpoint(model=model, optimizer=optimizer, progress=progress)
    fragile.run(step)
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
