"""Exponential moving averages of a model: `torch.optim.swa_utils.AveragedModel`, made in the scope, as torch has it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import raydist as rd

ROWS = torch.arange(12.0, dtype=torch.float64).reshape(6, 2) / 10


def averaged() -> tuple[nn.Module, AveragedModel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    return model, average, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def stepping(
    model: nn.Module, average: AveragedModel, optimizer: torch.optim.Optimizer
) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(rows: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        return loss.detach()

    return step


def train(strategy: rd.Strategy, directory: Path, epochs: int) -> AveragedModel:
    with strategy.scope():
        model, average, optimizer = averaged()
    step = stepping(model, average, optimizer)
    checkpoint = rd.Checkpoint(model=model, average=average, optimizer=optimizer)
    with rd.CheckpointManager(checkpoint, directory, max_to_keep=1) as manager:
        manager.restore_or_initialize()
        data = strategy.distribute_dataset(rd.Dataset.from_tensor_slices(ROWS.numpy()).batch(4))
        for _ in range(epochs):
            for rows in data:
                strategy.run(step, args=(rows,))
            manager.save()
    return average


def check(strategy: rd.Strategy, directory: Path) -> None:
    model, expected, optimizer = averaged()
    step = stepping(model, expected, optimizer)
    for _ in range(4):
        for rows in ROWS.split(4):
            step(rows)
    train(strategy, directory, 2)
    average = train(strategy, directory, 2)  # goes on where the first one was saved
    assert int(average.n_averaged) == int(expected.n_averaged) == 8
    torch.testing.assert_close(average(ROWS), expected(ROWS), rtol=1e-9, atol=0)


def test_on_one_device(tmp_path: Path) -> None:
    check(rd.OneDeviceStrategy("cpu"), tmp_path)


@pytest.mark.ray
@pytest.mark.timeout(120)
def test_on_replicas(mirrored: Callable[[int], rd.MirroredStrategy], tmp_path: Path) -> None:
    check(mirrored(2), tmp_path)
