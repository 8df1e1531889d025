"""Parameter servers: a process that is to end saves what was applied, and what has not begun is drawn again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import raydist as rd

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

ROWS = 60


def train(strategy: rd.ParameterServerStrategy, directory: Path, *, terminate: bool) -> float:
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
        train(strategy, tmp_path, terminate=True)
    assert train(strategy, tmp_path, terminate=False) == -sum(range(ROWS))
