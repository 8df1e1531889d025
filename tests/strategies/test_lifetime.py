"""The begin and the end of strategies with real replicas; threads that share a strategy."""

from __future__ import annotations

import contextlib
import functools
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
from raydist.strategies.hosted import WhenDropped
from tests.conftest import live_actors
from tests.pipelines.threads import in_threads

pytestmark = pytest.mark.timeout(120)


@pytest.mark.ray
def test_after_an_error_in_a_step_variables_keep_their_final_values_and_no_pass_over_a_dataset_begins(
    ray_cluster: None,
) -> None:
    before = live_actors()

    def train(fails: bool = False) -> None:
        if fails:
            raise KeyError("from the step")
        with torch.no_grad():
            weight.add_(1.0)

    with contextlib.suppress(KeyError), rd.MirroredStrategy(1, resources_per_replica={"CPU": 0.01}) as strategy:
        distributed = strategy.distribute_dataset(rd.Dataset.range(3).batch(1))
        iterator = iter(distributed)
        assert strategy.local_results(next(iter(distributed)))[0].tolist() == [0]
        with strategy.scope():
            weight = nn.Parameter(torch.zeros(2))
        strategy.run(train)
        strategy.run(train, args=(True,))
        assert weight.tolist() == [], "reading must raise the step's error"
    assert type(weight) is nn.Parameter
    assert weight.tolist() == [1.0, 1.0]
    for unread in (iterator, iter(distributed)):  # nobody would stop what makes its batches
        with pytest.raises(rd.FailedPreconditionError, match="is closed and can't read a distributed dataset"):
            next(unread)
    assert live_actors() - before == set()


THREADS = 3


def share_an_iterator(strategy: rd.MirroredStrategy) -> None:
    """Threads do, from the first step on."""
    batches = iter(strategy.distribute_dataset(rd.Dataset.range(40).batch(4)))
    sums: list[float] = []

    def read() -> None:
        for batch in batches:
            sums.append(float(strategy.reduce("SUM", strategy.run(torch.sum, args=(batch,)), None)))

    in_threads(THREADS, read)
    assert len(sums) == 10
    assert sum(sums) == sum(range(40))


@pytest.mark.ray
def test_threads_share_an_iterator_and_a_strategy_dropped_on_the_thread_that_brings_rays_answers_leaves_nothing(
    ray_cluster: None,
) -> None:
    """As garbage is collected by whatever thread is at work."""
    before = live_actors()
    strategies = [rd.MirroredStrategy(1, resources_per_replica={"CPU": 0.01})]
    share_an_iterator(strategies[0])
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


def reserved() -> set[str]:
    return {key for key, group in ray.util.placement_group_table().items() if group["state"] != "REMOVED"}


SCARCE = {"CPU": 0.01, "found nowhere": 1.0}
IMPOSSIBLE: tuple[Callable[[], rd.Strategy], ...] = (
    lambda: rd.MirroredStrategy(2, resources_per_replica=SCARCE),
    lambda: rd.ParameterServerStrategy(2, 1, resources_per_replica=SCARCE),
    lambda: rd.ParameterServerStrategy(2, 1, resources_per_server=SCARCE),
)


@pytest.mark.ray
def test_what_no_node_has_is_told_long_before_the_limit_and_nothing_stays_reserved(ray_cluster: None) -> None:
    before = reserved()
    for make in IMPOSSIBLE:
        strategy = make()
        began = time.monotonic()
        with pytest.raises(
            rd.FailedPreconditionError, match=r"can never hold.* no node has 1 found nowhere: the most is 0"
        ):
            strategy.scope().__enter__()
        assert time.monotonic() - began < 30  # of 120; an autoscaler that there may be has 15 to say that it is there
        assert reserved() - before == set()
        strategy.close()


class _Owner:
    def __init__(self) -> None:
        self.when_dropped = WhenDropped(self)


def test_closes_the_newest_first_on_a_thread_of_its_own_whichever_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool]] = []
    failures: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    here = threading.current_thread()

    def close(name: str) -> None:
        seen.append((name, threading.current_thread() is here))

    owner = _Owner()
    for name in ("old", "new"):
        owner.when_dropped.add(functools.partial(close, name))
        owner.when_dropped.add(lambda: [][0])
    del owner
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "raydist-closes-dropped":
            thread.join(10)
    assert seen == [("new", False), ("old", False)]
    assert len(failures) == 1


@pytest.mark.ray
@pytest.mark.parametrize("fixture", ["mirrored", "served"])
def test_threads_train_one_model_and_read_what_came_of_it(fixture: str, request: pytest.FixtureRequest) -> None:
    strategy: rd.Strategy = request.getfixturevalue(fixture)(2)
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        counter: Any = nn.Module()
        counter.register_buffer("count", torch.zeros((), dtype=torch.int64))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.item()

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(1, 1)).sum()
        loss.backward()
        optimizer.step()
        counter.count += 1
        return loss.detach()

    def train() -> None:
        for number in range(16):
            result = strategy.run(step)
            if number % 4 == 3:
                strategy.local_results(result)
                counter.count.item()

    in_threads(THREADS, train)
    assert counter.count.item() == 16 * THREADS
    assert model.weight.item() == pytest.approx(before - 16 * THREADS)
