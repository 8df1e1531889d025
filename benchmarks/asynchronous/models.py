"""The networks and their step in torch: the same for raydist and for the plain Ray server."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

import raydist as rd
from benchmarks.asynchronous.sizes import LEARNING_RATE, TABLE_COLUMNS, TABLE_ROWS, size_of
from benchmarks.steps.models import mlp

Batch = tuple[torch.Tensor, torch.Tensor]
LossOf = Callable[[nn.Module, Batch], torch.Tensor]


class ScoredRows(nn.Module):
    """What a linear unit says of rows of a large table."""

    def __init__(self, num_rows: int = TABLE_ROWS) -> None:
        super().__init__()
        self.table = rd.ShardedEmbedding(num_rows, TABLE_COLUMNS)
        self.score = nn.Linear(TABLE_COLUMNS, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        said: torch.Tensor = self.score(self.table(ids))[:, 0]
        return said


def make_network(workload: str) -> nn.Module:
    width = size_of(workload).width
    return mlp(width) if width else ScoredRows()


def loss_of(network: nn.Module, batch: Batch) -> torch.Tensor:
    """Of classes, or of yes and no."""
    inputs, targets = batch
    if targets.is_floating_point():
        return F.binary_cross_entropy_with_logits(network(inputs), targets)
    return F.cross_entropy(network(inputs), targets)


def sgd(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), LEARNING_RATE)


def make_step(network: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Batch], torch.Tensor]:
    """One step of training; gives the loss."""

    def step(batch: Batch) -> torch.Tensor:
        torch.set_flush_denormal(True)  # as TensorFlow does
        optimizer.zero_grad()
        loss = loss_of(network, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
