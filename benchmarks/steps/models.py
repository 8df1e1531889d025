"""The networks, their data and their step in torch: the same for every library that is built on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

Batch = tuple[torch.Tensor, torch.Tensor]
LEARNING_RATE, MOMENTUM = 0.05, 0.9
SEED = 0
"""Everybody begins with the same weights: a step of the CNN takes 33 ms instead of 37 where its units have died."""


@dataclass(frozen=True)
class Model:
    """A network, and the rows of a global batch."""

    make: Callable[[], nn.Module]
    global_batch: int


def mlp(width: int) -> nn.Module:
    torch.manual_seed(SEED)
    hidden = (nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, 10))


def cnn() -> nn.Module:
    torch.manual_seed(SEED)
    first = (nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(64 * 49, 128), nn.ReLU(), nn.Linear(128, 10))


MODELS: Mapping[str, Model] = MappingProxyType(
    {
        "mlp16": Model(lambda: mlp(16), 128),
        "mlp1024": Model(lambda: mlp(1024), 256),
        "cnn": Model(cnn, 256),
    }
)


def model_of(workload: str) -> Model:
    """What a workload trains, on however many nodes."""
    return MODELS[workload.removesuffix("_nodes")]


def load_images(folder: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Images (n, 1, 28, 28) in float32 and labels in int64."""
    pixels = np.load(folder / "mnist" / "images.npy").astype(np.float32)[:, None] / 255
    return pixels, np.load(folder / "mnist" / "labels.npy").astype(np.int64)


def sgd(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), LEARNING_RATE, MOMENTUM)


def make_step(network: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Batch], torch.Tensor]:
    """One step of training; gives the loss."""

    def step(batch: Batch) -> torch.Tensor:
        # As TensorFlow does: units that have died leave denormal numbers in the momentum, which by chance of the first
        # weights made a step of the 13k MLP take 0.25 or 0.41 ms.
        torch.set_flush_denormal(True)
        pixels, labels = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(network(pixels), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def local_batches(folder: Path, rank: int, num_ranks: int, global_batch: int) -> list[Batch]:
    """Ten batches of one rank, in memory: no input costs less."""
    pixels, labels = load_images(folder)
    rows = global_batch // num_ranks
    starts = [(num_ranks * index + rank) * rows for index in range(10)]
    return [(torch.tensor(pixels[at : at + rows]), torch.tensor(labels[at : at + rows])) for at in starts]
