"""A pool of input workers that grows while it runs, for one iterator."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, final

from raydist.actors.workers.pools_of_passes import SharedExecutor
from raydist.pipelines.autotune.pool_growth import PoolGrowth, PoolPeriod
from raydist.pipelines.engine.block_size import BlockSize
from raydist.pipelines.engine.budget import Budgets
from raydist.pipelines.engine.executor import Executor, Pending
from raydist.pipelines.engine.kernel import StageSpec
from raydist.pipelines.engine.machine import num_cores

if TYPE_CHECKING:
    from raydist.actors.workers.pool import ActorExecutor
    from raydist.pipelines.elements.blocks import Block
    from raydist.pipelines.metering.iteration_meters import IterationMeters
    from raydist.pipelines.metering.meter import Meter

__all__ = ["GrowingExecutor"]

_PERIOD_S = 1.0


def _idle_cores() -> float:
    """Return the mean number of idle cores over the last minute."""
    return num_cores() - os.getloadavg()[0]


def _leave(pool: ActorExecutor, num_workers: int) -> None:
    if not pool.closed:
        pool.resize(num_workers)


@final
class GrowingExecutor(Executor):
    """An executor that decides, at most once a second on submit, whether its pool gets one more worker.

    Args:
        pool: The pool. Closing this executor restores the pool's initial number of workers.
        num_workers: Initial number of workers.
        most: Largest number of workers.
        idle_cores: Returns the number of idle cores.
    """

    def __init__(
        self, pool: ActorExecutor, num_workers: int, most: int, idle_cores: Callable[[], float] = _idle_cores
    ) -> None:
        self._pool = pool
        self._growth = PoolGrowth(num_workers, most)
        self._idle_cores = idle_cores
        self._shared = SharedExecutor(pool, functools.partial(_leave, pool, num_workers))
        self._meters: IterationMeters | None = None
        self._stages: dict[str, Meter] = {}
        self._last = (0.0, 0.0, 0.0, 0)  # time, the consumer's and the stages' waiting seconds, elements
        self.place, self.stores_results = self._shared.place, self._shared.stores_results
        self._show_size()

    def _show_size(self) -> None:
        self.window, self.num_workers = self._shared.window, self._shared.num_workers
        for meter in self._stages.values():
            meter.parallelism = self.num_workers

    def for_stage(self, meter: Meter, meters: IterationMeters, budgets: Budgets) -> Executor:
        self._meters = meters
        self._stages[meter.name] = meter
        return self

    def block_size(self, spec: StageSpec, together: int) -> BlockSize:
        return self._shared.block_size(spec, together)

    def submit(self, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> Pending:
        if self._meters is not None and time.perf_counter() - self._last[0] > _PERIOD_S:
            self._look(self._meters)
        task = self._shared.submit(spec, block, starts)
        self._show_size()
        return task

    def _look(self, meters: IterationMeters) -> None:
        stages = tuple(self._stages.values())
        waited_s = meters.elapsed_s - meters.consumer_busy_s
        awaited_s, elements = sum(stage.awaited_s for stage in stages), sum(stage.elements for stage in stages)
        now, last = time.perf_counter(), self._last
        self._last = (now, waited_s, awaited_s, elements)
        if not last[0]:
            return
        elapsed_s = now - last[0]
        period = PoolPeriod(
            rate=(elements - last[3]) / elapsed_s,
            waits=(waited_s - last[1]) / elapsed_s,
            awaited=(awaited_s - last[2]) / elapsed_s,
            idle_cores=self._idle_cores(),
        )
        if why := self._growth.step(period):
            meters.decide(why)
            self._pool.resize(self._growth.num_workers)

    def close(self) -> None:
        self._shared.close()
