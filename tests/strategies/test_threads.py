"""Several threads of the driver that use one strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd
from tests.pipelines.threads import in_threads

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]

THREADS = 3


def test_threads_share_an_iterator_from_the_first_step_on() -> None:
    with rd.MirroredStrategy(2, resources_per_replica={"CPU": 0.01}) as strategy:
        batches = iter(strategy.distribute_dataset(rd.Dataset.range(40).batch(4)))
        sums: list[float] = []

        def read() -> None:
            for batch in batches:
                sums.append(float(strategy.reduce("SUM", strategy.run(torch.sum, args=(batch,)), None)))

        in_threads(THREADS, read)
        assert len(sums) == 10
        assert sum(sums) == sum(range(40))


def test_threads_train_one_model(two: rd.MirroredStrategy) -> None:
    with two.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.item()

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(1, 1)).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def train() -> None:
        for number in range(20):
            result = two.run(step)
            if number % 5 == 4:
                two.local_results(result)

    in_threads(THREADS, train)
    assert model.weight.item() == pytest.approx(before - 20 * THREADS)


def test_threads_schedule_closures_and_read_what_came_of_them(
    served: Callable[[int], rd.ParameterServerStrategy],
) -> None:
    strategy = served(2)
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        counter: Any = nn.Module()
        counter.register_buffer("count", torch.zeros((), dtype=torch.int64))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.item()

    def step() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 1)).sum()
        loss.backward()
        optimizer.step()
        counter.count += 1
        return float(loss.detach())

    def train() -> None:
        for number in range(12):
            result = strategy.run(step)
            if number % 4 == 3:
                result.get()
                counter.count.item()

    in_threads(THREADS, train)
    assert counter.count.item() == 12 * THREADS
    assert model.weight.item() == pytest.approx(before - 12 * THREADS)
