"""Another number of replicas in the middle of training: results are those of a run that was never resized."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd

pytestmark = pytest.mark.ray

NUM_ROWS, ROWS = 156, 12
LIMITS = rd.Timeouts(start_s=60, collective_s=15, step_s=60, close_s=5)
RESOURCES = {"CPU": 0.01}


@pytest.fixture
def mirrored(ray_cluster: None) -> Iterator[rd.MirroredStrategy]:
    with rd.MirroredStrategy(1, resources_per_replica=RESOURCES, timeouts=LIMITS) as strategy:
        yield strategy


@dataclass
class Trained:
    values: dict[str, torch.Tensor]
    mean: float
    rows: list[int]


class Net(nn.Module):
    """Two layers, a running mean, and a buffer whose shares add up."""

    level: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.register_buffer("level", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))
        rd.set_aggregation(self, "seen", aggregation="sum")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.level.lerp_(x.mean(0), 0.1)
        self.seen += x.sum()
        found: torch.Tensor = self.layers(x)
        return found


def train(strategy: Any, sizes: Mapping[int, int], *, ahead: int = 0) -> Trained:
    """Train two epochs, and resize before the steps in `sizes`; `ahead` batches are drawn before each step."""
    torch.manual_seed(0)
    inputs = torch.randn(NUM_ROWS, 4, dtype=torch.float64)
    data = rd.Dataset.from_tensor_slices((torch.arange(NUM_ROWS), inputs)).shuffle(NUM_ROWS, seed=1).batch(ROWS)
    with strategy.scope():
        model, mean = Net(), rd.Mean()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(batch: Any) -> torch.Tensor:
        numbers, x = batch
        optimizer.zero_grad()
        mean.update(x.sum(1))
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        return numbers

    found: list[Any] = []
    number = 0
    view = strategy.distribute_dataset(data)
    for _ in range(2):
        drawn: list[Any] = []
        batches = iter(view)
        while True:
            if number in sizes:
                strategy.resize(sizes[number])
                assert strategy.num_replicas_in_sync == len(strategy.worker_devices) == sizes[number]
            drawn += [batch for batch in [next(batches, None) for _ in range(1 + ahead - len(drawn))] if batch]
            if not drawn:
                break
            found.append(strategy.run(step, args=(drawn.pop(0),)))
            number += 1
    rows = [int(row) for each in found for part in strategy.local_results(each) for row in part]
    values = {name: each.clone() for name, each in model.state_dict().items()}
    for index, state in enumerate(optimizer.state.values()):
        values |= {f"{index}.{name}": torch.as_tensor(each).clone() for name, each in state.items()}
    return Trained(values, float(mean.compute()), rows)


def require_same(one: Trained, other: Trained) -> None:
    assert one.rows == other.rows
    assert one.mean == pytest.approx(other.mean, rel=1e-12)
    for name, value in one.values.items():
        torch.testing.assert_close(value, other.values[name], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(scope="module")
def never_resized() -> Trained:
    return train(rd.OneDeviceStrategy("cpu"), {})


def test_any_sizes_give_the_results_of_one_device(mirrored: rd.MirroredStrategy, never_resized: Trained) -> None:
    require_same(train(mirrored, {3: 2, 5: 4, 14: 3, 21: 1}), never_resized)
    assert sorted(never_resized.rows) == sorted([*range(NUM_ROWS)] * 2)


def test_batches_drawn_before_are_cut_again(mirrored: rd.MirroredStrategy, never_resized: Trained) -> None:
    require_same(train(mirrored, {2: 2, 17: 3}, ahead=2), never_resized)
