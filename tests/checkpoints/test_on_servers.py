"""Parameter servers write and read what they have, and a process that is to end saves what was applied."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import raydist as rd
from raydist.checkpoints import read_tensors
from raydist.coordinator.ps_servers import PsServers

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


def made() -> tuple[torch.nn.ModuleDict, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.ModuleDict({"words": rd.ShardedEmbedding(1000, 3, seed=5), "out": torch.nn.Linear(3, 1)})
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


def train(model: torch.nn.ModuleDict, optimizer: torch.optim.Optimizer, numbers: range, strategy: Any = None) -> None:
    def step(words: torch.Tensor) -> None:
        optimizer.zero_grad()
        model["out"](model["words"](words)).square().mean().backward()
        optimizer.step()

    for number in numbers:
        words = torch.arange(number, 90, 7)
        if strategy is None:
            step(words)
        else:
            strategy.run(step, args=(words,)).get()


def test_servers_restore_their_own_variables_and_training_continues(
    served: Callable[[int], rd.ParameterServerStrategy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made()
    train(model, optimizer, range(3))
    rd.Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "c")
    saved = model["words"](torch.arange(90)).detach()
    train(model, optimizer, range(3, 5))
    read: list[str] = []
    original = read_tensors._FileReader._read_piece

    def some(self: Any, size: int, what: str) -> bytes:
        read.append(Path(self._path).name)
        return original(self, size, what)

    monkeypatch.setattr(read_tensors._FileReader, "_read_piece", some)
    strategy = served(2)
    for num_steps in (0, 1):
        with strategy.scope():
            theirs, their_optimizer = made()
        train(theirs, their_optimizer, range(40, 40 + num_steps), strategy)
        checkpoint = rd.Checkpoint(model=theirs, optimizer=their_optimizer)
        checkpoint.restore(tmp_path / "c")
        assert not read
        assert torch.equal(theirs["words"](torch.arange(90)).detach(), saved)
        train(theirs, their_optimizer, range(3, 5), strategy)
        expected = model["words"](torch.arange(90)).detach()
        torch.testing.assert_close(theirs["words"](torch.arange(90)).detach(), expected, rtol=1e-5, atol=1e-6)


@pytest.fixture
def divided(ray_cluster: None) -> Iterator[rd.ParameterServerStrategy]:
    """Three servers, of which each has a part of what is large."""
    with rd.ParameterServerStrategy(
        1,
        3,
        rd.FixedShardsPartitioner(3),
        resources_per_server={"CPU": 0.01},
        resources_per_replica={"CPU": 0.01},
        timeouts=rd.Timeouts(start_s=60, collective_s=20, step_s=40),
    ) as strategy:
        yield strategy


@pytest.mark.long
def test_a_server_that_dies_after_reading_raises_unavailable_error(
    divided: rd.ParameterServerStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made()
    train(model, optimizer, range(3))
    rd.Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "c")
    with divided.scope():
        theirs, their_optimizer = made()
        step = rd.get_global_step()
    checkpoint = rd.Checkpoint(model=theirs, optimizer=their_optimizer)
    checkpoint.restore(tmp_path / "c", strict=False)
    train(theirs, their_optimizer, range(2), divided)
    step.add_(5)
    checkpoint.save(tmp_path / "own")
    expected = {name: value.detach().clone() for name, value in theirs.state_dict().items()}
    train(theirs, their_optimizer, range(2), divided)
    step.add_(5)
    checkpoint.restore(tmp_path / "own")
    assert int(step) == 5
    assert all(torch.equal(value, expected[name]) for name, value in theirs.state_dict().items())
    original = PsServers.commit_restore

    def commit(self: PsServers, token: str) -> Any:
        connection: Any = self._connections[1]
        pid = ray.get(connection.handle.__ray_call__.remote(lambda _: os.getpid()), timeout=20)
        os.kill(pid, signal.SIGKILL)
        return original(self, token)

    monkeypatch.setattr(PsServers, "commit_restore", commit)
    with pytest.raises(rd.UnavailableError, match="is gone, .* restore from your last checkpoint"):
        checkpoint.restore(tmp_path / "own")


ROWS = 60


def train_until_preempted(strategy: rd.ParameterServerStrategy, directory: Path, *, terminate: bool) -> float:
    """Takes each row off a weight; what that is in the end."""
    with strategy.scope():
        model = torch.nn.Linear(1, 1, bias=False).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with torch.no_grad():
        model.weight.zero_()

    def step(batch: torch.Tensor, pause_s: float) -> None:
        time.sleep(pause_s)
        optimizer.zero_grad()
        (model.weight * batch.double().sum()).sum().backward()
        optimizer.step()

    data = strategy.distribute_dataset(rd.Dataset.range(ROWS).shuffle(ROWS, seed=1).batch(3))
    checkpoint = rd.Checkpoint(model=model, optimizer=optimizer, data=data)
    coordinator = rd.ClusterCoordinator(strategy)
    with rd.CheckpointManager(checkpoint, directory, 2) as manager:
        manager.restore_or_initialize()
        for batch in data:
            coordinator.schedule(step, args=(batch, 0.1 if terminate else 0.0))
        if terminate:
            os.kill(os.getpid(), signal.SIGTERM)
        coordinator.join()
        return float(model.weight.detach())


def test_each_row_is_applied_once(served: Callable[[int], rd.ParameterServerStrategy], tmp_path: Path) -> None:
    strategy = served(2)
    with pytest.raises(rd.Preempted, match=r"before \d+ functions that were scheduled had begun.* What it reached is"):
        train_until_preempted(strategy, tmp_path, terminate=True)
    assert train_until_preempted(strategy, tmp_path, terminate=False) == -sum(range(ROWS))
