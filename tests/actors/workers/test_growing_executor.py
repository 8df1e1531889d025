"""A pool that grows under an iterator; the pool is a fake one, whose workers sleep side by side."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest

from raydist.actors.workers import growing_executor
from raydist.actors.workers.growing_executor import GrowingExecutor
from raydist.actors.workers.pool import ActorExecutor
from raydist.dataset import Dataset
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.engine.executor import Executor, Pending
from raydist.pipelines.engine.kernel import StageSpec
from raydist.pipelines.engine.threads import ThreadExecutor
from raydist.pipelines.metering.meter import StagePlace
from tests.contracts.op import iterate


class FakePool(Executor):
    """Threads in the place of actors."""

    place: StagePlace = "actors"

    def __init__(self, num_workers: int) -> None:
        self.threads = ThreadExecutor(num_workers)
        self.closed = False
        self.sizes = [num_workers]
        self.window, self.num_workers = 2 * num_workers, num_workers

    def submit(self, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> Pending:
        return self.threads.submit(spec, block, starts)

    def resize(self, num_workers: int) -> None:
        self.sizes.append(num_workers)
        self.window, self.num_workers = 2 * num_workers, num_workers
        self.threads.resize(num_workers)

    def close(self) -> None:
        self.closed = True
        self.threads.close()


def slow(x: Any) -> Any:
    time.sleep(0.002)
    return x


def grow(idle_cores: float, monkeypatch: pytest.MonkeyPatch) -> tuple[FakePool, list[str]]:
    monkeypatch.setattr(growing_executor, "_PERIOD_S", 0.03)
    pool = FakePool(2)
    executor = GrowingExecutor(cast(ActorExecutor, pool), 2, 3, lambda: idle_cores)
    iterator = iterate(Dataset.range(600).map(slow), lambda options: executor)
    assert [int(x) for x in iterator] == list(range(600))
    assert executor.place == "actors"
    executor.close()
    decisions = iterator.meters.decisions
    assert iterator.meters.readings()[1].parallelism == pool.sizes[-2 if len(pool.sizes) > 1 else -1]
    pool.close()
    return pool, decisions


def test_it_grows_on_cores_that_are_free_and_goes_back_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, decisions = grow(4.0, monkeypatch)
    assert pool.sizes[:2] == [2, 3]
    assert pool.sizes[-1] == 2
    assert decisions[0].startswith("3 input workers: the consumer waits")


def test_it_stays_where_no_core_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, decisions = grow(0.2, monkeypatch)
    assert pool.sizes == [2, 2]
    assert decisions == []
