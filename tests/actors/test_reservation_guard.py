"""A strategy in a Ray actor or task leaves nothing behind when the actor or task dies."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import ray

import raydist as rd
from tests.conftest import live_actors

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(120)]


def reservations() -> set[str]:
    return {name for name, group in ray.util.placement_group_table().items() if group["state"] != "REMOVED"}


def train() -> tuple[int, list[int]]:
    """Made, used and left open: in the process that calls this."""
    strategy = rd.MirroredStrategy(1, resources_per_replica={"CPU": 0.01})
    dataset = strategy.distribute_dataset(rd.Dataset.range(6).batch(3))
    iterator = iter(dataset)
    sums = [int(strategy.run(lambda x: x.sum(), args=(next(iterator),)))]
    resumed = iter(dataset)
    resumed.load_state_dict(iterator.state_dict())
    sums.append(strategy.run(lambda batches: sum(int(x.sum()) for x in batches), args=(resumed,)))
    KEPT.append(strategy)
    return os.getpid(), sums


KEPT: list[Any] = []


class Trainer:
    """An actor that trains."""

    def train(self) -> tuple[int, list[int]]:
        return train()

    def close(self) -> None:
        KEPT.pop().close()


class AsyncTrainer:
    """The same in an event loop, as in a notebook."""

    async def train(self) -> tuple[int, list[int]]:
        return train()


@pytest.mark.parametrize(
    "kind",
    ["task", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("closed", "killed", "async"))],
)
def test_nothing_is_left_of_a_strategy_when_its_actor_or_task_dies(kind: str) -> None:
    actors, before = live_actors(), reservations()
    if kind == "task":
        pid, sums = ray.get(ray.remote(train).options(num_cpus=0, max_retries=0).remote())
    else:
        trainer: Any = ray.remote(AsyncTrainer if kind == "async" else Trainer).options(num_cpus=0).remote()
        pid, sums = ray.get(trainer.train.remote())
    assert sums == [3, 12]
    assert reservations() - before
    if kind == "closed":
        ray.get(trainer.close.remote())
        assert not reservations() - before
        assert {name.split()[0] for name in live_actors() - actors} <= {"Trainer"}
        ray.kill(trainer)
    else:
        os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + 10
    while (reservations() - before or live_actors() - actors) and time.monotonic() < end:
        time.sleep(0.2)
    assert (reservations() - before, live_actors() - actors) == (set(), set())
