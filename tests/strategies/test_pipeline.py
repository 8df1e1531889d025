"""Replicas that compute stages of a module train what one device trains; checkpoints fit other strategies."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics import SumMetric

import raydist as rd
from tests.shared_strategies import KeptStrategies

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

LIMITS = rd.Timeouts(start_s=60, collective_s=20, step_s=60, close_s=5)
RESOURCES = {"CPU": 0.01}


def pipeline(stages: int, replicas: int = 1, microbatches: int | None = None, **options: Any) -> rd.PipelineStrategy:
    return rd.PipelineStrategy(
        stages, replicas, microbatches, timeouts=LIMITS, resources_per_replica=RESOURCES, **options
    )


@pytest.fixture
def two(kept: KeptStrategies) -> rd.PipelineStrategy:
    return kept.get(rd.PipelineStrategy, pipeline, 2)


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, batch_first=True)
        self.out = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.out(self.norm(x))


class Transformer(nn.Module):
    """A tiny language model, written as for one device."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.embedding, self.places = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embedding(tokens) + self.places(torch.arange(tokens.shape[1])) * self.scale
        mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x)).flatten(0, 1)


def transformer() -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, ...]]:
    model = Transformer().double()
    # Adam would blow up the gradient of the keys' bias, which is rounding noise.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, (torch.randint(0, 11, (46, 5)), torch.randint(0, 11, (46, 5)))


def convolutions() -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, ...]]:
    model = nn.Sequential(nn.Conv1d(2, 5, 3), nn.ReLU(), nn.Conv1d(5, 3, 2), nn.Flatten(), nn.Linear(9, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, (torch.randn(46, 2, 6, dtype=torch.float64), torch.randint(0, 3, (46,)))


def perceptron() -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, ...]]:
    model = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, (torch.randn(46, 4, dtype=torch.float64), torch.randint(0, 3, (46,)))


Make = Callable[[], tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, ...]]]


def loss_of(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, targets.flatten())


def train(strategy: rd.Strategy, make: Make, accumulate: int = 1) -> tuple[dict[str, Any], dict[str, Any], list[float]]:
    """Train with clipped gradients and an uneven last batch; return the model's and the optimizer's state, and losses."""
    torch.manual_seed(3)
    with strategy.scope():
        model, optimizer, data = make()
        total = SumMetric()
    in_stages = isinstance(strategy, rd.PipelineStrategy)

    def step(batch: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
        inputs, targets = batch
        if number % accumulate == 0:
            optimizer.zero_grad()
        if in_stages:
            loss = rd.get_replica_context().pipeline_step((inputs, targets), loss_of, model)
        else:
            loss = loss_of(model(inputs), targets)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        if (number + 1) % accumulate == 0:
            optimizer.step()
        shown: torch.Tensor = loss.detach() * len(inputs)
        total.update(shown)
        return shown

    batches = strategy.distribute_dataset(rd.Dataset.from_tensor_slices(data).batch(10))
    losses = []
    for number, batch in enumerate(batches):
        losses.append(float(torch.as_tensor(strategy.reduce("SUM", strategy.run(step, args=(batch, number)), axis=None))))
    assert float(total.compute()) == pytest.approx(sum(losses), rel=1e-6)
    state = optimizer.state_dict()["state"]
    slots = {f"{key}.{name}": value for key, held in state.items() for name, value in held.items()}
    return {name: each.clone() for name, each in model.state_dict().items()}, slots, losses


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float((each - other[name]).abs().max()) for name, each in one.items())


def check_training(strategy: rd.Strategy) -> None:
    for make, accumulate in ((transformer, 1), (transformer, 2), (convolutions, 1), (perceptron, 1)):
        expected, slots, losses = train(rd.OneDeviceStrategy("cpu"), make, accumulate)
        found, found_slots, found_losses = train(strategy, make, accumulate)
        assert difference(expected, found) < 1e-9
        assert difference(slots, found_slots) < 1e-9
        assert found_losses == pytest.approx(losses, abs=1e-9)


def test_two_stages_train_what_one_device_trains(two: rd.PipelineStrategy) -> None:
    assert two.num_replicas_in_sync == 1
    check_training(two)
