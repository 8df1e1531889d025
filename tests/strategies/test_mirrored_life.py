"""How strategies with real replicas begin and end."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import ray
import torch
from torch import nn

import raydist as rd
from tests.conftest import live_actors

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


@pytest.mark.parametrize("ending", ["close", "error in a step", "error on the driver"])
def test_variables_keep_their_final_values(ray_cluster: None, ending: str) -> None:
    strategy = rd.MirroredStrategy(1, resources_per_replica={"CPU": 0.01})

    def train() -> None:
        with torch.no_grad():
            weight.add_(1.0)

    def fail() -> None:
        raise KeyError("from the step")

    with contextlib.suppress(KeyError), strategy:
        with strategy.scope():
            weight = nn.Parameter(torch.zeros(2))
        strategy.run(train)
        if ending == "error in a step":
            strategy.run(fail)
            assert weight.tolist() == [], "reading must raise the step's error"
        if ending == "error on the driver":
            raise KeyError
    assert type(weight) is nn.Parameter
    assert weight.tolist() == [1.0, 1.0]


def test_a_strategy_that_is_dropped_on_the_thread_that_brings_rays_answers_leaves_nothing(ray_cluster: None) -> None:
    """As garbage is collected by whatever thread is at work."""
    before = live_actors()
    strategies = [rd.MirroredStrategy(1, resources_per_replica={"CPU": 0.01})]
    strategies[0].run(lambda: None)
    assert live_actors() - before
    dropped = threading.Event()

    def drop(answer: Any) -> None:
        strategies.clear()
        gc.collect()
        dropped.set()

    answer: Any = ray.remote(num_cpus=0)(lambda: 1).remote()
    answer._on_completed(drop)
    assert dropped.wait(30)
    assert ray.get(ray.remote(num_cpus=0)(lambda: 2).remote(), timeout=30) == 2
    end = time.monotonic() + 10
    while live_actors() - before and time.monotonic() < end:
        time.sleep(0.05)
    assert live_actors() - before == set()


def test_nothing_runs_after_close() -> None:
    strategy = rd.MirroredStrategy(2)
    strategy.close()
    strategy.close()
    with pytest.raises(rd.FailedPreconditionError, match="is closed and can't run a step"):
        strategy.run(lambda: None)
    with pytest.raises(rd.FailedPreconditionError, match="is closed and can't distribute"):
        strategy.distribute_dataset(rd.Dataset.range(3).batch(1))


@pytest.mark.parametrize("begun", [False, True])
def test_no_pass_over_a_dataset_begins_after_close(ray_cluster: None, begun: bool) -> None:
    """Nobody would stop what makes its batches."""
    before = live_actors()
    with rd.MirroredStrategy(1, resources_per_replica={"CPU": 0.01}) as strategy:
        distributed = strategy.distribute_dataset(rd.Dataset.range(3).batch(1))
        iterator = iter(distributed)
        assert not begun or strategy.local_results(next(iter(distributed)))[0].tolist() == [0]
    for unread in (iterator, iter(distributed)):
        with pytest.raises(rd.FailedPreconditionError, match="is closed and can't read a distributed dataset"):
            next(unread)
    assert live_actors() - before == set()


@pytest.mark.parametrize("bad", ["quantum:0", ["cpu", "cuda:0"], 0, []])
def test_bad_devices_fail_before_anything_starts(bad: Any) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="got"):
        rd.MirroredStrategy(bad)


def test_more_replicas_than_fit(ray_cluster: None) -> None:
    strategy = rd.MirroredStrategy(64, timeouts=rd.Timeouts(start_s=1.0))
    with pytest.raises(
        rd.DeadlineExceededError, match=r"could not place 64 replicas within 1 s. Asked: 64 x .*CPU.*free"
    ):
        strategy.scope().__enter__()
    strategy.close()


def reserved() -> set[str]:
    return {key for key, group in ray.util.placement_group_table().items() if group["state"] != "REMOVED"}


SCARCE = {"CPU": 0.01, "found nowhere": 1.0}
IMPOSSIBLE: dict[str, Callable[[], rd.Strategy]] = {
    "replicas": lambda: rd.MirroredStrategy(2, resources_per_replica=SCARCE),
    "workers": lambda: rd.ParameterServerStrategy(2, 1, resources_per_replica=SCARCE),
    "servers": lambda: rd.ParameterServerStrategy(2, 1, resources_per_server=SCARCE),
}


@pytest.mark.parametrize("make", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_no_node_has_is_told_long_before_the_limit_and_nothing_stays_reserved(
    ray_cluster: None, make: Callable[[], rd.Strategy]
) -> None:
    before = reserved()
    strategy = make()
    began = time.monotonic()
    with pytest.raises(
        rd.FailedPreconditionError, match=r"can never hold.* no node has 1 found nowhere: the most is 0"
    ):
        strategy.scope().__enter__()
    assert time.monotonic() - began < 30  # of 120; an autoscaler that there may be has 15 to say that it is there
    assert reserved() - before == set()
    strategy.close()
