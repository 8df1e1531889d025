"""A pool of input workers that grows while it runs, for one iterator."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from raydist.actors.workers.epoch_pools import SharedExecutor
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


_WAITS = 0.5  # share of the time that the consumer must wait for growth
_AWAITED = 0.1  # share of the time that the pipeline must wait for the pool
_GAIN = 0.03  # growth of elements per second that keeps a new worker
_STARTING = 3  # periods until a new worker has its full share of the work


@final
@dataclass(frozen=True, slots=True)
class PoolPeriod:
    """The activity of a pool in about a second.

    Attributes:
        rate: Elements per second.
        waits: Share of the time that the consumer waited for the pipeline.
        awaited: Share of the time that the pipeline waited for the pool.
        idle_cores: Number of idle cores.
    """

    rate: float
    waits: float
    awaited: float
    idle_cores: float


@final
class PoolGrowth:
    """A policy that adds workers while the consumer waits for the pool and cores are idle, until one does not help.

    Args:
        num_workers: Initial number of workers.
        most: Largest number of workers.

    Attributes:
        num_workers: Current number of workers.
    """

    def __init__(self, num_workers: int, most: int) -> None:
        self.num_workers = num_workers
        self._most = most
        self._starting = 0
        self._rate_before: float | None = None

    def step(self, period: PoolPeriod) -> str:
        """Learn from a period. Return the decision with its reason, or an empty text."""
        if self._starting:
            self._starting -= 1
            return ""
        if self._rate_before is not None:
            return self._judge(period.rate, self._rate_before)
        if self.num_workers >= self._most or period.idle_cores < 1:
            return ""
        if period.waits < _WAITS or period.awaited < _AWAITED:
            return ""
        self._rate_before, self._starting = period.rate, _STARTING
        self.num_workers += 1
        return f"{self.num_workers} input workers: the consumer waits {period.waits:.0%} of the time"

    def _judge(self, rate: float, before: float) -> str:
        self._rate_before = None
        if rate >= (1 + _GAIN) * before:
            return ""
        self._most = self.num_workers = self.num_workers - 1
        return f"{self.num_workers} input workers: one more gave {rate / before - 1:+.0%}"


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
