"""Strategies are closed, dropped, ended by an error: what the process and the cluster hold stays the same."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import ray
import torch
from torch import nn

import raydist as rd
from tests.chaos.extent import how_many
from tests.conftest import live_actors
from tests.shared_files import left_behind, shared_files

ROUNDS = how_many(some=1, many=20)  # of some strategies each
REPLICAS = how_many(some=1, many=2)

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(90 + 60 * ROUNDS)]


def holdings() -> dict[str, Any]:
    """What there is, of what a strategy may leave behind."""
    groups = ray.util.placement_group_table().values()
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "actors": live_actors(),
        "groups": sum(group["state"] != "REMOVED" for group in groups),
    }


def train(strategy: rd.MirroredStrategy, *, fail_at: int = -1) -> None:
    """A model, a distributed dataset, and an iteration with input workers of one's own."""
    with strategy.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(batch: torch.Tensor, fail: bool) -> torch.Tensor:
        if fail:
            raise KeyError("asked to fail")
        optimizer.zero_grad()
        loss: torch.Tensor = model(batch.float().view(-1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    dataset = rd.Dataset.range(12).map(lambda x: x + 1)
    for number, batch in enumerate(strategy.distribute_dataset(dataset.batch(4))):
        strategy.local_results(strategy.run(step, args=(batch, number == fail_at)))


def close(strategy: rd.MirroredStrategy) -> None:
    train(strategy)
    strategy.close()


def leave(strategy: rd.MirroredStrategy) -> None:
    with strategy:
        train(strategy)


def drop(strategy: rd.MirroredStrategy) -> None:
    train(strategy)


def fail(strategy: rd.MirroredStrategy) -> None:
    with pytest.raises(KeyError, match="asked to fail"), strategy:
        train(strategy, fail_at=1)


def iterate(strategy: rd.MirroredStrategy) -> None:
    strategy.close()  # before anything was started
    workers = rd.Options(num_input_workers=1)
    assert len(list(rd.Dataset.range(6).map(lambda x: x).with_options(workers))) == 6


WAYS: tuple[Callable[[rd.MirroredStrategy], None], ...] = (iterate, drop, fail, leave, close)


def come_and_go(ways: Sequence[Callable[[rd.MirroredStrategy], None]]) -> None:
    for number, way in enumerate(ways):
        way(rd.MirroredStrategy(1 + number % REPLICAS, resources_per_replica={"CPU": 0.01}))


def settled(before: dict[str, Any]) -> dict[str, Any]:
    """What is held once it is no more than `before`, or after 10 s."""
    end = time.monotonic() + 10
    while (now := after_collection()) != before and time.monotonic() < end:
        time.sleep(0.2)
    return now


def after_collection() -> dict[str, Any]:
    gc.collect()
    return holdings()


@pytest.mark.long
def test_what_is_held_stays_the_same() -> None:
    come_and_go((close, iterate))  # for what libraries keep
    files, before = shared_files(), settled({})
    for _ in range(ROUNDS):
        come_and_go(WAYS[: how_many(some=3, many=5)])
    now = settled(before)
    assert now.pop("descriptors") <= before.pop("descriptors") + 2  # Ray opens and closes connections as it likes
    assert now == before
    assert not left_behind(files)
