"""Growth of a pool of input workers: a worker takes a second to start, so the pool grows by one at a time, rarely."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

__all__ = ["PoolGrowth", "PoolPeriod"]

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
