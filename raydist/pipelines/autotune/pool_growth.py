"""When a pool of input workers gets one more: a worker takes a second to start, so one at a time, and rarely."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

__all__ = ["PoolGrowth", "PoolPeriod"]

_WAITS = 0.5  # share of the time that the consumer must wait
_AWAITED = 0.1  # share of the time that must be spent waiting for the pool
_GAIN = 0.03  # by which elements a second must have grown to keep a worker
_STARTING = 3  # periods until a new worker has its share of the work


@final
@dataclass(frozen=True, slots=True)
class PoolPeriod:
    """What a pool did for about a second.

    Attributes:
        rate: Elements a second.
        waits: Share of the time in which the consumer waited for the pipeline.
        awaited: Share of the time in which the pipeline waited for the pool.
        idle_cores: Cores that had nothing to do.
    """

    rate: float
    waits: float
    awaited: float
    idle_cores: float


@final
class PoolGrowth:
    """Grows while the consumer waits for the pool and cores are free, until a worker more does not help.

    Args:
        num_workers: At the beginning.
        most: At most.

    Attributes:
        num_workers: That the pool should have now.
    """

    def __init__(self, num_workers: int, most: int) -> None:
        self.num_workers = num_workers
        self._most = most
        self._starting = 0
        self._rate_before: float | None = None

    def step(self, period: PoolPeriod) -> str:
        """Learn from a period; what was decided and why, or nothing."""
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
