"""Counters for Ray's metrics: a general set, training progress, and checkpoint saves."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, final

import ray
from ray.util.metrics import Counter


@final
class MetricCounters:
    """Counters with the same tags, for Ray's dashboard and its exporters.

    Args:
        described: The description of each counter, by name.
        tags: The tags of every counter.
    """

    def __init__(self, described: Mapping[str, str], tags: Mapping[str, str]) -> None:
        self._described = dict(described)
        self._tags = dict(tags)
        self._counters: dict[str, Any] = {}

    def raise_by(self, amounts: Mapping[str, float]) -> None:
        """Add the amounts to the counters. Skip amounts that are not positive; do nothing if Ray is not initialised."""
        if not ray.is_initialized():
            return
        for name, amount in amounts.items():
            if amount > 0:  # Ray refuses 0
                self._counter(name).inc(amount, tags=self._tags)

    def _counter(self, name: str) -> Any:
        if name not in self._counters:
            self._counters[name] = Counter(name, description=self._described[name], tag_keys=tuple(self._tags))
        return self._counters[name]


_SAVES = {
    "raydist_checkpoints": "Checkpoints that were begun.",
    "raydist_checkpoint_pause_seconds": "Time that training stood still while states were copied.",
}


@final
class SaveMetrics:
    """Counters of the saves into one checkpoint directory, in the driver.

    Args:
        directory: The directory as it may be shown; a tag.
        counters: The object that takes the counts.
    """

    def __init__(self, directory: str, counters: Any = None) -> None:
        self._counters = counters or MetricCounters(_SAVES, {"directory": directory})

    def note_save(self, seconds: float) -> None:
        """Count one save that paused training for `seconds`."""
        self._counters.raise_by({"raydist_checkpoints": 1, "raydist_checkpoint_pause_seconds": seconds})


_EVERY_S = 5.0
_TRAINING = {
    "raydist_steps": "Steps that have ended: calls of strategy.run, closures.",
    "raydist_examples": "Rows of batches that steps were run on.",
    "raydist_recoveries": "Recoveries from lost replicas or input pipelines.",
    "raydist_recovery_seconds": "Seconds from the errors to the next steps, of all recoveries together.",
}


@final
class TrainingMetrics:
    """Counters of the training of one strategy, in the driver. Not thread-safe.

    Args:
        strategy: Name of the strategy; a tag.
        counters: The object that takes the counts.
        now: The time in seconds.
    """

    def __init__(self, strategy: str, counters: Any = None, now: Callable[[], float] = time.monotonic) -> None:
        self._counters = counters or MetricCounters(_TRAINING, {"strategy": strategy})
        self._now = now
        self._steps = self._rows = 0
        self._next = now() + _EVERY_S

    def step_ended(self, rows: int) -> None:
        """Count one step. Updates Ray's metrics once every few seconds, so most calls cost nothing."""
        self._steps += 1
        self._rows += rows
        if self._now() >= self._next:
            self.publish()

    def note_recovery(self, seconds: float) -> None:
        """Count a recovery that took so long."""
        self._counters.raise_by({"raydist_recoveries": 1, "raydist_recovery_seconds": seconds})

    def publish(self) -> None:
        """Update Ray's metrics."""
        steps, rows, self._steps, self._rows = self._steps, self._rows, 0, 0
        self._next = self._now() + _EVERY_S
        self._counters.raise_by({"raydist_steps": steps, "raydist_examples": rows})
