"""Statistics of a pipeline for users: `dataset.stats()`; and the bottleneck, computed from readings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from raydist.pipelines.metering.iteration_meters import IterationMeters
from raydist.pipelines.metering.meter import Reading, StageKind, StagePlace

CONSUMER = "consumer"
"""Name of the consumer of the whole pipeline, among the names of stages."""

HANDING_OVER = "handing over"
"""Name of the conversion of blocks to elements for the consumer, among the names of stages."""

_CONSUMERS_THREAD = "the consumer's thread"

_HEADINGS = ("stage", "where", "elements/s", "MB/s", "busy", "cpu", "queue", "waits for", "operation")
_WORDS = ("stage", "where", "waits for", "operation")  # columns that are aligned to the left
_MOST_LABEL = 48
_ALL = 0.995
_NOTHING = "Nothing has run yet: iterate over the dataset first."


@final
@dataclass(frozen=True, slots=True)
class StageStats:
    """One stage of a pipeline. Shares are of the time since the iteration began, 0 .. 1.

    Attributes:
        name: Names of the operations: "map-1+filter-2".
        label: The label of the operations in `explain()`.
        inputs: Names of the input stages.
        kind: "source", "stage", "exchange" (changes the order of elements) or "prefetch" (a queue and its thread).
        place: "inline" (in the consumer's thread), "threads" or "actors".
        parallelism: Current number of workers.
        elements: Elements handed out.
        elements_per_s: Elements per second.
        bytes: Bytes handed out; an estimate where elements are bytes, str or of varying shape.
        bytes_here: Bytes of these that passed through the pipeline's process; the others stayed where input workers had
            stored them.
        bytes_per_s: Bytes per second.
        errors: Errors handed out in place of elements.
        busy: Share of the workers' time with work.
        cpu: Share of that work that used a CPU; None if not measured. A low value means waits, for a disk or for other
            threads.
        queue_fill: Mean fill level of the queue when the consumer asked, 0 .. 1; None without a queue.
        waits_for: The longest wait: an input, "its workers", or the stage that reads this one ("consumer" at the end);
            "" if it mostly worked.
        waiting: Share of the time of that wait.

    >>> ds = rd.Dataset.range(10).batch(5)
    >>> _ = list(ds)
    >>> [(stage.name, stage.elements, stage.where) for stage in ds.stats().stages]
    [('range-0', 10, 'inline'), ('batch-1', 2, 'inline')]
    """

    name: str
    label: str
    inputs: tuple[str, ...]
    kind: StageKind
    place: StagePlace
    parallelism: int
    elements: int
    elements_per_s: float
    bytes: int
    bytes_here: int
    bytes_per_s: float
    errors: int
    busy: float
    cpu: float | None
    queue_fill: float | None
    waits_for: str
    waiting: float

    @property
    def where(self) -> str:
        """Place and parallelism: "inline", "2 threads"; "1 thread" for a prefetch."""
        if self.kind == "prefetch":
            return "1 thread"
        return "inline" if self.place == "inline" else workers_text(self.parallelism, self.place)

    @property
    def waits(self) -> str:
        """The longest wait and its share: "map-1 (72 %)"; "" if the stage mostly worked."""
        return f"{self.waits_for} ({percent(self.waiting)})" if self.waits_for else ""


@final
@dataclass(frozen=True, slots=True)
class PipelineStats:
    """Statistics of an iteration since its start. `str()` gives a table.

    Attributes:
        stages: Statistics of the stages, inputs before their consumers.
        elapsed_s: Seconds from the first request for an element until the last element was handed out.
        elements: Elements that the last stage handed out.
        consumer_waited: Share of the time that the consumer waited for elements.
        bottleneck: Name of the stage that limits all others; "consumer" for the consumer, "handing over" for the
            conversion of elements to tensors or arrays, "" if nothing has run.
        because: The busy thread or workers, and their share of the time.
        decisions: Changes by the autotuner with reasons, oldest first.

    >>> print(rd.Dataset.range(3).stats())
    Nothing has run yet: iterate over the dataset first.
    """

    stages: tuple[StageStats, ...] = ()
    elapsed_s: float = 0.0
    elements: int = 0
    consumer_waited: float = 0.0
    bottleneck: str = ""
    because: str = ""
    decisions: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.stages:
            return _NOTHING
        lines = [self.headline, "", *render([_row(stage) for stage in self.stages]), "", *self.findings]
        return "\n".join(lines)

    @property
    def headline(self) -> str:
        """Number of elements, their rate, and the wait of the consumer."""
        rate = quantity(self.elements / self.elapsed_s if self.elapsed_s else 0.0)
        return (
            f"{self.elements:,} elements in {self.elapsed_s:.2f} s, {rate} a second; "
            f"the consumer waited {percent(self.consumer_waited)} of the time."
        )

    @property
    def findings(self) -> list[str]:
        """The bottleneck, the bytes that stayed with workers, and the autotuner's decisions, one sentence each."""
        limit = [f"Bottleneck: {self.bottleneck} ({self.because})."] if self.bottleneck else []
        elsewhere = [
            f"{each.name}: {percent(1 - each.bytes_here / each.bytes)} of {each.bytes / 1e6:,.1f} MB stayed with input "
            "workers."
            for each in self.stages
            if each.bytes_here < each.bytes
        ]
        return limit + elsewhere + [f"Autotune: {decision}" for decision in self.decisions]


def stats_of(meters: IterationMeters | None) -> PipelineStats:
    """Return the statistics of an iteration; empty statistics for None."""
    if meters is None:
        return PipelineStats()
    return summarise(
        meters.readings(),
        elapsed_s=meters.elapsed_s,
        consumer_busy_s=meters.consumer_busy_s,
        convert_s=meters.convert_s,
        decisions=meters.decisions,
    )


def summarise(
    readings: Sequence[Reading],
    *,
    elapsed_s: float,
    consumer_busy_s: float = 0.0,
    convert_s: float = 0.0,
    decisions: Sequence[str] = (),
) -> PipelineStats:
    """Compute shares and rates from totals. See :class:`IterationMeters` for the arguments."""
    if not readings:
        return PipelineStats(elapsed_s=elapsed_s, decisions=tuple(decisions))
    limit = find_bottleneck(readings, consumer_busy_s=consumer_busy_s, convert_s=convert_s)
    by_name = {reading.name: reading for reading in readings}
    readers = {name: reading.name for reading in readings for name in reading.inputs}
    return PipelineStats(
        stages=tuple(_stage(r, by_name, readers.get(r.name, CONSUMER), elapsed_s) for r in readings),
        elapsed_s=elapsed_s,
        elements=readings[-1].elements,
        consumer_waited=_share(elapsed_s - consumer_busy_s, elapsed_s),
        bottleneck=limit.name,
        because=_because(limit, elapsed_s),
        decisions=tuple(decisions),
    )


def _because(limit: Bottleneck, elapsed_s: float) -> str:
    busy = percent(_share(limit.busy_s, elapsed_s))
    if limit.share > _ALL:
        return f"{limit.where}: busy {busy} of the time"
    return f"{percent(limit.share)} of the work of {limit.where}, which was busy {busy} of the time"


def _stage(reading: Reading, by_name: Mapping[str, Reading], reader: str, elapsed_s: float) -> StageStats:
    waits_for, waiting_s = _longest_wait(reading, by_name, reader, elapsed_s)
    return StageStats(
        name=reading.name,
        label=reading.label,
        inputs=reading.inputs,
        kind=reading.kind,
        place=reading.place,
        parallelism=reading.parallelism,
        elements=reading.elements,
        elements_per_s=reading.elements / elapsed_s if elapsed_s else 0.0,
        bytes=reading.bytes,
        bytes_here=reading.bytes_here,
        bytes_per_s=reading.bytes / elapsed_s if elapsed_s else 0.0,
        errors=reading.errors,
        busy=_share(reading.busy_s, elapsed_s * reading.workers),
        cpu=_share(reading.cpu_s, reading.busy_s - reading.handling_s) if reading.cpu_s else None,
        queue_fill=_share(reading.mean_buffered, reading.buffer_limit) if _has_queue(reading) else None,
        waits_for=waits_for,
        waiting=_share(waiting_s, elapsed_s),
    )


def _longest_wait(reading: Reading, by_name: Mapping[str, Reading], reader: str, elapsed_s: float) -> tuple[str, float]:
    """Return the main activity of a stage in the thread that calls it: a wait for another stage, or work ("")."""
    inputs = [by_name[name] for name in reading.inputs if name in by_name]
    slowest = max(inputs, key=lambda source: source.busy_s + source.wait_s, default=reading).name
    in_thread_s = reading.busy_s if reading.place == "inline" else reading.handling_s
    waits = {
        "": in_thread_s,
        slowest: reading.input_wait_s,
        reader: max(0.0, elapsed_s - in_thread_s - reading.wait_s),
    }
    for_others = slowest if reading.kind == "prefetch" else "its workers"
    waits[for_others] = waits.get(for_others, 0.0) + reading.wait_s - reading.input_wait_s
    longest = max(waits, key=lambda who: waits[who])
    return longest, waits[longest] if longest else 0.0


def _has_queue(reading: Reading) -> bool:
    return reading.buffer_limit > 0 and (reading.kind == "prefetch" or reading.place != "inline")


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0


def _row(stage: StageStats) -> Sequence[str]:
    return (
        stage.name,
        stage.where,
        quantity(stage.elements_per_s),
        f"{stage.bytes_per_s / 1e6:,.1f}",
        percent(stage.busy),
        "" if stage.cpu is None else percent(stage.cpu),
        "" if stage.queue_fill is None else percent(stage.queue_fill),
        stage.waits,
        stage.label if len(stage.label) <= _MOST_LABEL else f"{stage.label[: _MOST_LABEL - 3]}...",
    )


def render(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with aligned columns: words to the left, numbers to the right."""
    cells = [_HEADINGS, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(_aligned, _HEADINGS, line, widths)).rstrip() for line in cells]


def _aligned(heading: str, cell: str, width: int) -> str:
    return cell.ljust(width) if heading in _WORDS else cell.rjust(width)


def quantity(number: float) -> str:
    """Format a number with three digits and a unit of thousands.

    >>> quantity(1_234_567), quantity(45_600), quantity(999), quantity(1.5)
    ('1.23 M', '45.6 k', '999', '1.5')
    """
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}" if number < 999.5 else "1 k"


def workers_text(number: int, place: str) -> str:
    """Format the number and kind of workers.

    >>> workers_text(1, "threads"), workers_text(4, "actors")
    ('1 thread', '4 actors')
    """
    return f"{number} {place.removesuffix('s') if number == 1 else place}"


def percent(share: float) -> str:
    """Format a share of 0 .. 1 as a whole percentage.

    >>> percent(0.126)
    '13 %'
    """
    return f"{share:.0%}".replace("%", " %")


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
