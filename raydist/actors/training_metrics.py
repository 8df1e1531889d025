"""What a strategy's training has done, for Ray's dashboard and whatever scrapes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, final

from raydist.actors.metric_counters import MetricCounters

__all__ = ["TrainingMetrics"]

_EVERY_S = 5.0
_DESCRIBED = {
    "raydist_steps": "Steps that have ended: calls of strategy.run, closures.",
    "raydist_examples": "Rows of batches that steps were run on.",
}


@final
class TrainingMetrics:
    """Of one strategy, in the driver. Used by one thread at a time.

    Args:
        strategy: Its name, a tag.
        counters: What takes the counts.
        now: The time in seconds.
    """

    def __init__(self, strategy: str, counters: Any = None, now: Callable[[], float] = time.monotonic) -> None:
        self._counters = counters or MetricCounters(_DESCRIBED, {"strategy": strategy})
        self._now = now
        self._steps = self._rows = 0
        self._next = now() + _EVERY_S

    def step_ended(self, rows: int) -> None:
        """A step has ended. Costs nothing but for one call in some seconds."""
        self._steps += 1
        self._rows += rows
        if self._now() >= self._next:
            self.publish()

    def publish(self) -> None:
        """Tell Ray."""
        steps, rows, self._steps, self._rows = self._steps, self._rows, 0, 0
        self._next = self._now() + _EVERY_S
        self._counters.raise_by({"raydist_steps": steps, "raydist_examples": rows})
