"""What saving checkpoints costs a training, for Ray's dashboard and whatever scrapes it."""

from __future__ import annotations

from typing import Any, final

from raydist.actors.metric_counters import MetricCounters

__all__ = ["SaveMetrics"]

_DESCRIBED = {
    "raydist_checkpoints": "Checkpoints that were begun.",
    "raydist_checkpoint_pause_seconds": "Time that training stood still while states were copied.",
}


@final
class SaveMetrics:
    """Of one directory, in the driver.

    Args:
        directory: It, a tag: as it may be shown.
        counters: What takes the counts.
    """

    def __init__(self, directory: str, counters: Any = None) -> None:
        self._counters = counters or MetricCounters(_DESCRIBED, {"directory": directory})

    def note_save(self, seconds: float) -> None:
        """A save has begun, and training goes on after so many seconds."""
        self._counters.raise_by({"raydist_checkpoints": 1, "raydist_checkpoint_pause_seconds": seconds})
