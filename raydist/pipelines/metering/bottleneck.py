"""The bottleneck of a running pipeline, computed from readings.

All stages process the same stream in the same time, so the busiest stage limits the others. But stages between two
queues share one thread: so the busiest thread or group of workers is found first, then its busiest stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from raydist.pipelines.metering.reading import Reading
from raydist.pipelines.metering.stats_table import workers_text

__all__ = ["CONSUMER", "HANDING_OVER", "Bottleneck", "find_bottleneck", "threads_of"]

CONSUMER = "consumer"
"""Name of the consumer of the whole pipeline, among the names of stages."""

HANDING_OVER = "handing over"
"""Name of the conversion of blocks to elements for the consumer, among the names of stages."""

_CONSUMERS_THREAD = "the consumer's thread"


@final
@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The bottleneck of a pipeline.

    Attributes:
        name: Name of the stage, CONSUMER, or HANDING_OVER; "" if nothing has run.
        where: The thread or workers without spare time.
        busy_s: Seconds that each of them was busy.
        share: Share of these seconds for the stage, 0 .. 1.
    """

    name: str = ""
    where: str = ""
    busy_s: float = 0.0
    share: float = 0.0


def find_bottleneck(readings: Sequence[Reading], *, consumer_busy_s: float = 0.0, convert_s: float = 0.0) -> Bottleneck:
    """Return the busiest stage of the busiest thread or group of workers.

    Args:
        readings: Readings of all stages, inputs before their consumers.
        consumer_busy_s: Seconds that the consumer spent on its own work.
        convert_s: Seconds that the consumer's thread spent on handing over elements.
    """
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    groups[_CONSUMERS_THREAD] = {CONSUMER: consumer_busy_s, HANDING_OVER: convert_s}
    threads = threads_of(readings)
    for reading in readings:
        in_thread_s = reading.busy_s if reading.place == "inline" else reading.handling_s
        groups[threads[reading.name]][reading.name] = in_thread_s
        if reading.place != "inline":
            workers = f"its {workers_text(reading.parallelism, reading.place)}"
            work_s = (reading.busy_s - reading.handling_s) / reading.workers
            groups[f"{reading.name}: {workers}"] = {reading.name: work_s}
    where, busiest = max(groups.items(), key=lambda group: sum(group[1].values()))
    total_s = sum(busiest.values())
    if not total_s:
        return Bottleneck()
    name = max(busiest, key=lambda stage: busiest[stage])
    return Bottleneck(name, where.removeprefix(f"{name}: "), total_s, busiest[name] / total_s)


def threads_of(readings: Sequence[Reading]) -> Mapping[str, str]:
    """Return the thread in which each stage is called: the thread of the pipeline's consumer, or of a prefetch."""
    threads: dict[str, str] = {}
    for reading in reversed(readings):
        mine = threads.setdefault(reading.name, _CONSUMERS_THREAD)
        for name in reading.inputs:
            threads.setdefault(name, f"the thread of {reading.name}" if reading.kind == "prefetch" else mine)
    return threads
