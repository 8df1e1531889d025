"""What the passes of an input pipeline have done, for Ray's dashboard and whatever scrapes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from ray.util.metrics import Gauge

from raydist.actors.metric_counters import MetricCounters
from raydist.pipelines.metering.stats import PipelineStats

__all__ = ["InputMetrics"]

_DESCRIBED = {
    "raydist_input_batches": "Global batches that input pipelines have made.",
    "raydist_input_bytes": "Bytes of these.",
    "raydist_input_wait_seconds": "Seconds that readers had no work and waited for a batch, of all readers together.",
}


@final
@dataclass(frozen=True, slots=True)
class _Seen:
    """What was told of a pass before."""

    batches: float = 0.0
    num_bytes: float = 0.0
    wait_s: float = 0.0


@final
class InputMetrics:
    """Of one input pipeline, in its process.

    Args:
        pipeline: Its name, a tag.
        counters: What takes the counts.
        fill: What takes how full queues are.
    """

    def __init__(self, pipeline: str, counters: Any = None, fill: Any = None) -> None:
        self._tags = {"pipeline": pipeline}
        self._counters = counters or MetricCounters(_DESCRIBED, self._tags)
        self._fill = fill or Gauge(
            "raydist_input_queue_fill",
            description="How full the queue of a stage is when its reader asks, 0 to 1. Empty: it is too slow.",
            tag_keys=("pipeline", "stage"),
        )
        self._seen: dict[str, _Seen] = {}

    def update(self, key: str, stats: PipelineStats, wait_s: float) -> None:
        """A pass has done this since it began."""
        before = self._seen.get(key, _Seen())
        num_bytes = stats.stages[-1].bytes if stats.stages else 0
        now = self._seen[key] = _Seen(stats.elements, num_bytes, wait_s)
        self._counters.raise_by(
            {
                "raydist_input_batches": now.batches - before.batches,
                "raydist_input_bytes": now.num_bytes - before.num_bytes,
                "raydist_input_wait_seconds": now.wait_s - before.wait_s,
            }
        )
        for stage in stats.stages:
            if stage.queue_fill is not None:
                self._fill.set(stage.queue_fill, tags={**self._tags, "stage": stage.name})

    def forget(self, key: str) -> None:
        """A pass has ended."""
        self._seen.pop(key, None)
