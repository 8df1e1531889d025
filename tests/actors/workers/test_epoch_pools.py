"""The number of workers for AUTOTUNE, pools that are reused by the next epoch, and the start of workers."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest

from raydist.actors.workers import epoch_pools
from raydist.actors.workers.epoch_pools import EpochPools, choose_num_workers
from raydist.actors.workers.executors import Executors
from raydist.actors.workers.handle import WorkerKind
from raydist.actors.workers.pool import RunningWorkers
from raydist.cluster import placement
from raydist.cluster.placement import Outlook
from raydist.core.errors import FailedPreconditionError
from raydist.dataset import Dataset
from raydist.options import Options, Timeouts
from raydist.pipelines.autotune.tuned_executor import TunedExecutor
from tests.waiting import wait_until


def double(x: Any) -> Any:
    return x * 2


LIGHT = Dataset.range(10).shuffle(10).batch(2)
HEAVY = Dataset.range(10).map(double).shuffle(10).batch(2)
ORDERED = Dataset.range(10).map(double, num_parallel_calls=1).batch(2)


def test_autotune_takes_spare_cores_for_user_functions() -> None:
    for dataset, cores, replicas, nodes, workers in [
        (LIGHT, 64, 1, 1, 0),
        (ORDERED, 64, 1, 1, 0),
        (HEAVY, 2, 2, 1, 0),
        (HEAVY, 4, 2, 1, 0),
        (HEAVY, 8, 4, 1, 3),
        (HEAVY, 64, 4, 1, 8),
        (HEAVY, 8, 4, 2, 11),  # the spare cores of all nodes
        (HEAVY, 64, 4, 2, 16),
    ]:
        chosen = choose_num_workers([dataset._op], num_cores=cores, num_replicas=replicas, num_nodes=nodes)
        assert chosen == workers, (dataset, cores, replicas, nodes)


def test_workers_with_resources_of_their_own_need_no_core_here() -> None:
    chosen = [
        choose_num_workers([op], num_cores=cores, num_replicas=2, are_elsewhere=True)
        for op in (HEAVY._op, LIGHT._op)
        for cores in (2, 8)
    ]
    assert chosen == [1, 5, 0, 0]


class FakePool:
    """A pool that is idle or not, as the test sets it."""

    def __init__(self, num_workers: int, **kwargs: Any) -> None:
        self.num_workers = num_workers
        self.idle = True
        self.closed = False

    def serves(self, num_workers: int, resources: Any, timeouts: Any, memory_bytes: Any, node_ids: Any) -> bool:
        return num_workers == self.num_workers

    def is_idle(self, patience_s: float) -> bool:
        return self.idle

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[EpochPools]:
    monkeypatch.setattr(epoch_pools, "ActorExecutor", FakePool)
    pools = EpochPools()
    yield pools
    pools.clear()


def borrow(pools: EpochPools, num_workers: int) -> Any:
    return pools.borrow(num_workers, name="x", resources={}, timeouts=Timeouts())


def test_the_pool_given_back_last_serves_the_next_pass_and_all_others_are_closed(pools: EpochPools) -> None:
    busy, first, second = (borrow(pools, 2) for _ in range(3))
    busy.idle = False
    for pool in (busy, first, second):
        pools.give_back(pool, patience_s=0.0)
    assert [pool.closed for pool in (busy, first, second)] == [True, False, True]
    assert borrow(pools, 2) is first
    assert borrow(pools, 2) is not first
    pools.give_back(first, patience_s=0.0)
    other = borrow(pools, 3)
    assert (other.num_workers, first.closed) == (3, True), "another kind of pool replaces it"
    pools.give_back(other, patience_s=0)
    pools.clear()
    pools.clear()
    assert other.closed
    assert borrow(pools, 3) is not other


def test_a_pool_that_nobody_wants_is_stopped_after_a_while(pools: EpochPools) -> None:
    def borrow_for_a_while() -> Any:
        return pools.borrow(2, name="x", resources={}, timeouts=Timeouts(idle_s=0.2))

    pool = borrow_for_a_while()
    pools.give_back(pool, patience_s=0)
    assert borrow_for_a_while() is pool
    time.sleep(0.3)
    assert not pool.closed  # it is in use
    pools.give_back(pool, patience_s=0)
    wait_until(lambda: pool.closed, 20)


# --- executors of a dataset's iterators -------------------------------------------------------------------------------


def test_what_the_autotuner_learned_is_kept_for_the_next_iterator() -> None:
    executors = Executors()
    first = executors.open(Options())
    assert isinstance(first, TunedExecutor)
    first.close()
    second = executors.open(Options())
    assert isinstance(second, TunedExecutor)
    assert second._tuner is first._tuner


# --- running workers --------------------------------------------------------------------------------------------------


class Worker:
    """Runs from a time on."""

    def __init__(self, after_s: float = 0.0) -> None:
        self._from = time.monotonic() + after_s

    @property
    def runs(self) -> bool:
        return time.monotonic() >= self._from


def running(resources: dict[str, float], start_s: float = 20.0) -> Any:
    return RunningWorkers("pool", WorkerKind(resources, start_s=start_s))


def test_blocks_go_to_workers_that_run_and_the_first_one_is_enough() -> None:
    workers: Any = [Worker(60), Worker(), Worker(), Worker(60)]
    assert running({}).place_of_next(workers, [0, 2, 1, 0]) == 2
    assert running({}).place_of_next(workers[:1], [5]) == 0  # there is no other
    watched = running({"CPU": 1.0})
    later: Any = [Worker(60), Worker(0.2)]
    watched.await_first(lambda: later, lambda: False)
    assert later[1].runs
    watched.await_first(lambda: pytest.fail("asked again"), lambda: False)


def test_workers_that_no_node_can_hold_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    node = {"NodeID": "a", "NodeManagerAddress": "10.0.0.1", "Alive": True, "Resources": {"CPU": 4.0}}
    monkeypatch.setattr("ray.nodes", lambda: [node])
    monkeypatch.setattr(placement, "_SETTLE_S", 0.1)
    monkeypatch.setattr(placement, "look", lambda: Outlook(grows=False))
    workers: Any = [Worker(60)]
    with pytest.raises(FailedPreconditionError, match=r"can never hold 1 input workers. Asked: 1 x {'CPU': 8.0}"):
        running({"CPU": 8.0}).await_first(lambda: workers, lambda: False)


def test_a_pool_that_stays_small_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    watched = running({"CPU": 1.0}, start_s=0.1)
    workers: Any = [Worker(), Worker(60)]
    with caplog.at_level(logging.WARNING, "raydist"):
        watched.place_of_next(workers, [0, 0])
        assert not caplog.records
        time.sleep(0.15)
        watched.place_of_next(workers, [0, 0])
        watched.place_of_next(workers, [0, 0])
    (record,) = caplog.records
    assert "1 of 2 input workers of pool have not started within 0.1 s" in record.getMessage()
