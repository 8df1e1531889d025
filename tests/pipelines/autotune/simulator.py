"""A small simulator of pipelines: blocks move through stages on a clock of its own.

Stages have a cost for each block, a part of which holds the GIL; the consumer's thread works on what is inline, gives
blocks to workers, and waits for the oldest one; the consumer has a pace of its own, beside or behind a prefetch.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from raydist.pipelines.autotune.costs import StagePeriod
from raydist.pipelines.autotune.model import INLINE, Knob, Limits, Settings, StageSetting, workers_of
from raydist.pipelines.autotune.propose import BLOCKS_PER_WORKER
from raydist.pipelines.autotune.tuner import Period
from raydist.pipelines.metering.reading import StagePlace

ROWS = 16  # of every block
HANDLING_S = 0.0001  # giving a block to a thread and taking it back
PREFETCH = "prefetch"


@dataclass(frozen=True)
class Stage:
    """Seconds for a block, the share that holds the GIL, whether it computes; what moving it to an actor adds."""

    name: str
    block_s: float
    serial: float
    computing: float
    moving_s: float
    block_bytes: int
    places: tuple[StagePlace, ...]


@dataclass(frozen=True)
class Pipeline:
    """Stages in a row behind a source, before a consumer."""

    stages: tuple[Stage, ...]
    source_s: float
    consumer_s: float
    limits: Limits
    prefetch: bool

    def knobs(self) -> list[Knob]:
        knobs = [Knob(stage.name, stage.places) for stage in self.stages]
        return [*knobs, Knob(PREFETCH, splits=True)] if self.prefetch else knobs


class Workers:
    """The workers of a stage, or one thread: each block goes to the one that is free first."""

    def __init__(self, count: int) -> None:
        self.free_at = [0.0] * count

    def run(self, ready_at: float, seconds: float) -> float:
        begin = max(ready_at, heapq.heappop(self.free_at))
        heapq.heappush(self.free_at, begin + seconds)
        return begin + seconds


def simulate(pipeline: Pipeline, settings: Settings, num_blocks: int = 60) -> Period:
    """The second half of a run of `num_blocks` blocks, from empty queues.

    The GIL slows all threads of the process down by the same factor: found by running the blocks again with costs
    stretched until the parts that hold it fit one after the other.
    """
    stretch = 1.0
    for _ in range(4):
        period, gil_s = _run(pipeline, settings, stretch, num_blocks)
        if gil_s <= period.elapsed_s * 1.02:
            break
        stretch *= gil_s / period.elapsed_s
    return period


def _run(pipeline: Pipeline, settings: Settings, stretch: float, num_blocks: int) -> tuple[Period, float]:
    run = _Run(pipeline, settings, stretch)
    marks: list[float] = []
    half = num_blocks // 2
    for number in range(num_blocks):
        if number == half:
            run.forget()
        marks.append(run.consume(number))
    elapsed_s = marks[-1] - marks[half - 1]
    blocks = num_blocks - half
    gil_s = blocks * sum(
        s.serial * s.block_s for s in pipeline.stages if settings.get(s.name, INLINE).place != "actors"
    )
    consumer_s = blocks * pipeline.consumer_s
    return Period(elapsed_s, max(0.0, elapsed_s - consumer_s), consumer_s, run.stage_periods(blocks)), gil_s


class _Run:
    """Pulls blocks, the consumer first, as the engine does: a stage fills its window before it waits for its oldest."""

    def __init__(self, pipeline: Pipeline, settings: Settings, stretch: float) -> None:
        self.pipeline = pipeline
        self.settings = settings
        self.stretch = stretch
        self.parted = settings.get(PREFETCH, INLINE).workers > 0
        self.now = 0.0  # of the thread that runs the pipeline
        self.consumer_now = 0.0
        self.handed_out: list[float] = []
        self.workers = {s.name: Workers(settings[s.name].workers) for s in pipeline.stages if self._moved(s)}
        self.flights: dict[str, list[float]] = {stage.name: [] for stage in pipeline.stages}
        self.forget()

    def _moved(self, stage: Stage) -> bool:
        return self.settings.get(stage.name, INLINE).workers > 0

    def forget(self) -> None:
        self.awaited: dict[str, float] = {stage.name: 0.0 for stage in self.pipeline.stages}
        self.produced_s = 0.0

    def consume(self, number: int) -> float:
        """Make one block and hand it to the consumer; when the consumer is done with it."""
        if not self.parted:
            self.now = max(self.now, self.consumer_now)
        elif number >= 4:  # no further ahead than the prefetch's buffer
            self.now = max(self.now, self.handed_out[number - 4])
        begin = self.now
        self._pull(len(self.pipeline.stages))
        self.produced_s += self.now - begin
        self.consumer_now = max(self.consumer_now, self.now) + self.pipeline.consumer_s
        self.handed_out.append(self.consumer_now - self.pipeline.consumer_s)
        return self.consumer_now

    def _pull(self, depth: int) -> None:
        """One block of the first `depth` stages, in the pipeline's thread."""
        if depth == 0:
            self.now += self.pipeline.source_s
            return
        stage = self.pipeline.stages[depth - 1]
        if not self._moved(stage):
            self._pull(depth - 1)
            self.now += self._seconds(stage)
            return
        flights, setting = self.flights[stage.name], self.settings[stage.name]
        away = setting.place == "actors"
        while len(flights) < BLOCKS_PER_WORKER * setting.workers:
            self._pull(depth - 1)
            self.now += stage.moving_s if away else HANDLING_S
            seconds = stage.block_s + stage.moving_s if away else self._seconds(stage)
            flights.append(self.workers[stage.name].run(self.now, seconds))
        waited = max(0.0, flights.pop(0) - self.now)
        self.awaited[stage.name] += waited
        self.now += waited

    def _seconds(self, stage: Stage) -> float:
        """Only what holds the GIL is held up by others that hold it."""
        return stage.block_s * (1 - stage.serial + stage.serial * self.stretch)

    def stage_periods(self, blocks: int) -> list[StagePeriod]:
        periods = [self._stage_period(stage, blocks) for stage in self.pipeline.stages]
        if self.pipeline.prefetch:
            setting = self.settings.get(PREFETCH, INLINE)
            periods.append(StagePeriod(PREFETCH, setting, ROWS * blocks, blocks, self.produced_s))
        return periods

    def _stage_period(self, stage: Stage, blocks: int) -> StagePeriod:
        setting = self.settings.get(stage.name, INLINE)
        busy_s = blocks * (stage.block_s if setting.place == "actors" else self._seconds(stage))
        cpu_s = blocks * stage.block_s * stage.computing
        num_bytes = blocks * stage.block_bytes
        return StagePeriod(
            stage.name, setting, ROWS * blocks, blocks, busy_s, cpu_s, self.awaited[stage.name], num_bytes
        )


def random_pipeline(seed: int) -> Pipeline:
    """Stages of 0.2 to 20 ms a block: some compute without the GIL, some with it, some wait."""
    rng = random.Random(seed)
    stages = tuple(_random_stage(rng, f"map-{number}") for number in range(rng.randint(1, 3)))
    limits = Limits(rng.randint(1, 6), rng.choice([float("inf"), 16e6]))
    consumer_s = rng.choice([0.0, 10 ** rng.uniform(-4, -2)])
    return Pipeline(stages, 10 ** rng.uniform(-5, -3), consumer_s, limits, rng.random() < 0.5)


def _random_stage(rng: random.Random, name: str) -> Stage:
    serial = rng.choice([0.0, rng.random(), 1.0])
    computing = 1.0 if serial else rng.choice([0.0, 1.0])
    places: tuple[StagePlace, ...] = rng.choice([("inline", "threads"), ("inline", "threads", "actors")])
    size = rng.choice([10_000, 1_000_000])
    return Stage(name, 10 ** rng.uniform(-3.7, -1.7), serial, computing, 10 ** rng.uniform(-3.3, -2.5), size, places)


def all_settings(pipeline: Pipeline) -> Iterator[Mapping[str, StageSetting]]:
    """Every setting within the limits."""
    choices = [_choices(knob, pipeline.limits.workers) for knob in pipeline.knobs()]
    names = [knob.name for knob in pipeline.knobs()]
    for chosen in itertools.product(*choices):
        settings = dict(zip(names, chosen, strict=True))
        if (
            workers_of(settings) <= pipeline.limits.workers
            and buffered(pipeline, settings) <= pipeline.limits.ram_bytes
        ):
            yield settings


def _choices(knob: Knob, most: int) -> list[StageSetting]:
    places: list[StagePlace] = [place for place in knob.places if place != "inline"]
    counts = range(1, (1 if knob.splits else most) + 1)
    return [INLINE, *(StageSetting(place, count) for place in places for count in counts)]


def buffered(pipeline: Pipeline, settings: Settings) -> float:
    """Bytes of the blocks under way."""
    return sum(BLOCKS_PER_WORKER * settings.get(s.name, INLINE).workers * s.block_bytes for s in pipeline.stages)
