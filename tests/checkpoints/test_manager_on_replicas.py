"""Saves under strategies with replicas: a point in the order of dispatched steps, which waits for none of them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import raydist as rd
from raydist.checkpoints import checkpoint as saving
from raydist.checkpoints.shards import ShardTerms
from tests.summary.reading import curves

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


class Net(torch.nn.Module):
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
        model = Net()
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


def test_a_save_does_not_wait_for_steps_and_has_the_state_behind_them(two: rd.Strategy, tmp_path: Path) -> None:
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


def test_what_steps_recorded_before_a_save_is_on_disk_when_it_is_committed(two: rd.Strategy, tmp_path: Path) -> None:
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


def test_a_save_behind_a_failed_step_fails_with_its_error(two: rd.Strategy, tmp_path: Path) -> None:
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


def test_replicas_divide_what_is_large_and_merge_what_they_count_apart(
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


def test_a_save_is_no_step(two: rd.Strategy, tmp_path: Path) -> None:
    model, optimizer, step = made(two)
    two.run(step)
    num_steps = two.stats().steps
    with rd.CheckpointManager(rd.Checkpoint(model=model, optimizer=optimizer), tmp_path, 1) as manager:
        manager.save()
    assert two.stats().steps == num_steps


def test_central_storage_saves_as_the_driver_reads(
    central: Callable[[int], rd.CentralStorageStrategy], tmp_path: Path
) -> None:
    model, optimizer, step = made(central(2))
    central(2).run(step)
    with rd.CheckpointManager(rd.Checkpoint(model=model, optimizer=optimizer), tmp_path, 1) as manager:
        handle = manager.save()
    assert handle is not None
    saved = load_file(Path(handle.path) / "model.safetensors")
    now = values(model)
    assert all(torch.equal(saved[name], now[name]) for name in now)


def test_servers_write_what_they_have_and_no_step_is_waited_for(
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
