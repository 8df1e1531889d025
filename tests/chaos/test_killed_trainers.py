"""Workers of a coordinator are killed at random: every closure's effect is there once, and every result."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time

import pytest
import torch
from torch import nn

import raydist as rd
from tests.chaos.extent import how_many
from tests.shared_strategies import few_workers

SCHEDULED = how_many(some=30, many=1_000)
KILLS = how_many(some=1, many=200)
WORKERS = how_many(some=1, many=2)

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(60 + 15 * KILLS)]


@pytest.mark.long
def test_every_effect_is_there_once_and_every_result() -> None:
    rng = random.Random(0)
    kill_at = set(rng.sample(range(SCHEDULED), KILLS))
    strategy = few_workers(WORKERS)
    with strategy:
        with strategy.scope():
            weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))
            optimizer = torch.optim.SGD([weight], lr=1.0)

        def step(amount: float) -> tuple[float, int]:
            weight.grad = torch.full_like(weight, -amount)
            optimizer.step()
            time.sleep(0.002)
            return amount, os.getpid()

        coordinator = rd.ClusterCoordinator(strategy)
        values: list[rd.RemoteValue] = []
        for number in range(SCHEDULED):
            values.append(coordinator.schedule(step, args=(float(number),)))
            if number in kill_at:
                _, pid = values[max(0, number - rng.randrange(4))].get()
                time.sleep(rng.random() / 100)
                with contextlib.suppress(ProcessLookupError):  # its worker was killed before
                    os.kill(pid, signal.SIGKILL)
        assert [amount for amount, _ in coordinator.fetch(values)] == [float(number) for number in range(SCHEDULED)]
        assert weight.tolist() == [sum(range(SCHEDULED))] * 2
