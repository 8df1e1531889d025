"""Which part of a running pipeline holds up all others: pure arithmetic on readings.

All stages pass on the same stream in the same time, so the one that is busiest limits them all. Stages between two
queues share one thread, though: first the busiest thread or group of workers is found, then what it is busy with.
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
"""Stands among the names of stages for whoever iterates over the whole pipeline."""

HANDING_OVER = "handing over"
"""Stands among the names of stages for turning blocks into the elements that the consumer gets."""

_CONSUMERS_THREAD = "the consumer's thread"


@final
@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What limits a pipeline.

    Attributes:
        name: The stage, CONSUMER, or HANDING_OVER; "" if nothing has run.
        where: The thread or workers that have no time left.
        busy_s: Seconds for which these were busy, each.
        share: What part of these seconds the stage took, 0 .. 1.
    """

    name: str = ""
    where: str = ""
    busy_s: float = 0.0
    share: float = 0.0


def find_bottleneck(readings: Sequence[Reading], *, consumer_busy_s: float = 0.0, convert_s: float = 0.0) -> Bottleneck:
    """The busiest stage of the busiest thread or group of workers.

    Args:
        readings: Of all stages, inputs before their consumers.
        consumer_busy_s: Seconds that the consumer spent on its own work.
        convert_s: Seconds spent in the consumer's thread on handing elements over.
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
    """For each stage the thread that its consumer asks it in: the pipeline's consumer's, or that of a prefetch."""
    threads: dict[str, str] = {}
    for reading in reversed(readings):
        mine = threads.setdefault(reading.name, _CONSUMERS_THREAD)
        for name in reading.inputs:
            threads.setdefault(name, f"the thread of {reading.name}" if reading.kind == "prefetch" else mine)
    return threads
