"""How many workers AUTOTUNE takes, and pools that pass from one epoch to the next."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from raydist.actors.workers import epoch_pools
from raydist.actors.workers.epoch_pools import EpochPools, SharedExecutor, choose_num_workers
from raydist.dataset import Dataset
from raydist.options import Timeouts
from raydist.pipelines.engine.executor import InlineExecutor


def double(x: Any) -> Any:
    return x * 2


LIGHT = Dataset.range(10).shuffle(10).batch(2)
HEAVY = Dataset.range(10).map(double).shuffle(10).batch(2)
ORDERED = Dataset.range(10).map(double, num_parallel_calls=1).batch(2)


@pytest.mark.parametrize(
    ("dataset", "cores", "replicas", "workers"),
    [
        (LIGHT, 64, 1, 0),
        (ORDERED, 64, 1, 0),
        (HEAVY, 2, 2, 0),
        (HEAVY, 4, 2, 0),
        (HEAVY, 8, 4, 3),
        (HEAVY, 64, 4, 8),
    ],
)
def test_autotune_takes_spare_cores_for_user_functions(
    dataset: Dataset, cores: int, replicas: int, workers: int
) -> None:
    assert choose_num_workers([dataset._op], num_cores=cores, num_replicas=replicas) == workers


def test_autotune_takes_the_spare_cores_of_all_nodes() -> None:
    assert choose_num_workers([HEAVY._op], num_cores=8, num_replicas=4, num_nodes=2) == 11
    assert choose_num_workers([HEAVY._op], num_cores=64, num_replicas=4, num_nodes=2) == 16


def test_workers_with_resources_of_their_own_need_no_core_here() -> None:
    chosen = [
        choose_num_workers([op], num_cores=cores, num_replicas=2, are_elsewhere=True)
        for op in (HEAVY._op, LIGHT._op)
        for cores in (2, 8)
    ]
    assert chosen == [1, 5, 0, 0]


class FakePool:
    """Counts; idle as long as it is told to be."""

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


def test_a_pool_that_came_back_serves_the_next_pass(pools: EpochPools) -> None:
    pool = borrow(pools, 2)
    pools.give_back(pool, patience_s=0.0)
    assert borrow(pools, 2) is pool
    assert borrow(pools, 2) is not pool


def test_another_kind_of_pool_replaces_it(pools: EpochPools) -> None:
    pool = borrow(pools, 2)
    pools.give_back(pool, patience_s=0.0)
    assert borrow(pools, 3) is not pool
    assert pool.closed


def test_busy_and_surplus_pools_are_closed(pools: EpochPools) -> None:
    busy, first, second = (borrow(pools, 2) for _ in range(3))
    busy.idle = False
    for pool in (busy, first, second):
        pools.give_back(pool, patience_s=0.0)
    assert [pool.closed for pool in (busy, first, second)] == [True, False, True]


def test_an_iterator_cannot_close_the_pool_of_others() -> None:
    class Watched(InlineExecutor):  # type: ignore[misc]  # final for the engine; here only `close` is watched
        def close(self) -> None:
            raise AssertionError("closed")

    shared = SharedExecutor(Watched())
    shared.close()
    assert shared.window == 1


def test_clearing_closes_what_is_kept(pools: EpochPools) -> None:
    pool = borrow(pools, 2)
    pools.give_back(pool, patience_s=0)
    pools.clear()
    pools.clear()
    assert pool.closed
    assert borrow(pools, 2) is not pool


def test_a_pool_that_nobody_wants_is_stopped_after_a_while(pools: EpochPools) -> None:
    pool = pools.borrow(2, name="x", resources={}, timeouts=Timeouts(idle_s=0.3))
    pools.give_back(pool, patience_s=0)
    assert pools.borrow(2, name="x", resources={}, timeouts=Timeouts(idle_s=0.3)) is pool
    time.sleep(0.5)
    assert not pool.closed  # it is in use
    pools.give_back(pool, patience_s=0)
    end = time.monotonic() + 20
    while not pool.closed and time.monotonic() < end:
        time.sleep(0.02)
    assert pool.closed
