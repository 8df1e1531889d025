"""Real digits: two replicas learn what one learns, step by step."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import raydist as rd
from tests.real_data import real_file

ROOT = Path(__file__).parent.parent.parent
BATCH_SIZE = 128
NUM_TRAIN = 8000


def small_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(576, 10),
    ).double()


def to_inputs(images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    return images[:, None] / 255.0, labels.astype(np.int64)


def losses_of_an_epoch(strategy: rd.Strategy, images: Any, labels: Any) -> list[float]:
    """The loss of every step, over all its rows."""
    torch.manual_seed(0)
    with strategy.scope():
        model = small_network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)

    def train_step(batch: Any) -> tuple[torch.Tensor, int]:
        x, y = batch
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss * len(y), len(y)

    rows = rd.Dataset.from_tensor_slices((images[:NUM_TRAIN], labels[:NUM_TRAIN]))
    batches = strategy.distribute_dataset(rows.shuffle(NUM_TRAIN, seed=1).batch(BATCH_SIZE).map(to_inputs))
    results = [strategy.run(train_step, args=(batch,)) for batch in batches]
    sums = [(strategy.reduce("SUM", loss), strategy.reduce("SUM", count)) for loss, count in results]
    return [float(loss / count) for loss, count in sums]


@pytest.mark.ray
@pytest.mark.timeout(240)
def test_every_step_has_the_loss_of_one_replica(two: rd.MirroredStrategy) -> None:
    data = np.load(real_file("mnist10k.npz"))
    losses = losses_of_an_epoch(two, data["images"], data["labels"])
    expected = losses_of_an_epoch(rd.OneDeviceStrategy("cpu"), data["images"], data["labels"])
    assert len(losses) == -(-NUM_TRAIN // BATCH_SIZE)
    assert losses[-1] < losses[0] / 3
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-6)


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(240)
def test_two_replicas_learn_to_read_digits() -> None:
    flags = ["--strategy", "mirrored", "--replicas", "2", "--epochs", "3", "--data", str(real_file("mnist10k.npz"))]
    command = [sys.executable, str(ROOT / "examples" / "digits_fit.py"), *flags]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    (accuracy,) = re.findall(r"^test accuracy: (\d\.\d+)$", done.stdout, flags=re.MULTILINE)
    assert float(accuracy) >= 0.96
