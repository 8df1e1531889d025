"""The begin and the end of strategies with real replicas; threads that share a strategy."""

from __future__ import annotations

import contextlib
import functools
import gc
import subprocess
import sys
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


@pytest.mark.ray
@pytest.mark.timeout(120)
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


@pytest.mark.ray
@pytest.mark.timeout(120)
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


@pytest.mark.ray
@pytest.mark.timeout(120)
def test_nothing_runs_after_close() -> None:
    strategy = rd.MirroredStrategy(2)
    strategy.close()
    strategy.close()
    with pytest.raises(rd.FailedPreconditionError, match="is closed and can't run a step"):
        strategy.run(lambda: None)
    with pytest.raises(rd.FailedPreconditionError, match="is closed and can't distribute"):
        strategy.distribute_dataset(rd.Dataset.range(3).batch(1))


@pytest.mark.ray
@pytest.mark.timeout(120)
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


@pytest.mark.ray
@pytest.mark.timeout(120)
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


@pytest.mark.ray
@pytest.mark.timeout(120)
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


class _Owner:
    def __init__(self) -> None:
        self.when_dropped = WhenDropped(self)


def _await_closing() -> None:
    for thread in threading.enumerate():
        if thread.name == "raydist-closes-dropped":
            thread.join(10)


def test_closes_the_newest_first_on_a_thread_of_its_own() -> None:
    seen: list[tuple[str, bool]] = []
    here = threading.current_thread()

    def close(name: str) -> None:
        seen.append((name, threading.current_thread() is here))

    owner = _Owner()
    for name in ("old", "new"):
        owner.when_dropped.add(functools.partial(close, name))
    del owner
    gc.collect()
    _await_closing()
    assert seen == [("new", False), ("old", False)]


def test_one_that_fails_keeps_none_from_being_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    seen: list[str] = []
    owner = _Owner()
    owner.when_dropped.add(lambda: seen.append("closed"))
    owner.when_dropped.add(lambda: [][0])
    del owner
    gc.collect()
    _await_closing()
    assert (seen, len(failures)) == (["closed"], 1)


def test_closes_at_the_end_of_the_program_what_it_held_till_then() -> None:
    program = (
        "from raydist.strategies.hosted import WhenDropped\n"
        "class Owner: pass\n"
        "owner = Owner()\n"
        "WhenDropped(owner).add(lambda: print('closed'))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert (done.stdout, done.stderr) == ("closed\n", "")


THREADS = 3


@pytest.mark.ray
@pytest.mark.timeout(120)
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


@pytest.mark.ray
@pytest.mark.timeout(120)
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


@pytest.mark.ray
@pytest.mark.timeout(120)
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
