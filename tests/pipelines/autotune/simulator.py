"""A model of pipelines for tests: the time of a period follows from the number of threads of each part."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from raydist.pipelines.autotune.tuner import BLOCKS_PER_THREAD, Activity, Period, TunedSetting

ROWS = 16  # of every block
BLOCKS = 30  # in every period
HANDLING_S = 0.0001  # giving a block to a thread and taking it back
PREFETCH = "prefetch"


@dataclass(frozen=True)
class Stage:
    """Seconds for a block, the share of it that holds the GIL, the share that uses a CPU, and the size of a block."""

    name: str
    block_s: float
    serial: float = 0.0
    computing: float = 1.0
    block_bytes: int = 10_000


@dataclass(frozen=True)
class Pipeline:
    """Stages in a row behind a source, before a consumer."""

    stages: tuple[Stage, ...]
    source_s: float = 0.00001
    consumer_s: float = 0.0
    threads: int = 4
    ram_bytes: float = float("inf")
    prefetch: bool = False

    def tuned(self) -> list[TunedSetting]:
        ahead = [TunedSetting(PREFETCH, ahead=1)] if self.prefetch else []
        return [*(TunedSetting(stage.name) for stage in self.stages), *ahead]

    def buffered(self, threads: Mapping[str, int]) -> float:
        """Bytes of the blocks in flight."""
        return sum(BLOCKS_PER_THREAD * threads[stage.name] * stage.block_bytes for stage in self.stages)

    def settings(self) -> Iterator[dict[str, int]]:
        """Every number of threads within the limits."""
        choices = [range(1 if setting.ahead else self.threads + 1) for setting in self.tuned()]
        for chosen in itertools.product(*([*choice, 1] if len(choice) == 1 else choice for choice in choices)):
            threads = {setting.name: count for setting, count in zip(self.tuned(), chosen, strict=True)}
            if sum(threads.values()) <= self.threads and self.buffered(threads) <= self.ram_bytes:
                yield threads

    def seconds(self, threads: Mapping[str, int]) -> tuple[float, float]:
        """Seconds for a block, and the seconds of the thread that makes it."""
        inline = [stage for stage in self.stages if not threads[stage.name]]
        moved = [stage for stage in self.stages if threads[stage.name]]
        own_s = self.source_s + sum(stage.block_s for stage in inline) + HANDLING_S * len(moved)
        slowest_s = max((stage.block_s / threads[stage.name] for stage in moved), default=0.0)
        gil_s = sum(stage.serial * stage.block_s for stage in self.stages)
        beside = threads.get(PREFETCH, 0)
        first_s = max(own_s, self.consumer_s) + HANDLING_S if beside else own_s + self.consumer_s
        return max(first_s, slowest_s, gil_s), own_s

    def period(self, threads: Mapping[str, int], noise: float = 1.0) -> Period:
        block_s, own_s = self.seconds(threads)
        elapsed_s = noise * BLOCKS * block_s
        consumer_s = min(elapsed_s, BLOCKS * self.consumer_s)
        cpu_s = BLOCKS * (self.source_s + sum(stage.block_s * stage.computing for stage in self.stages))
        parts = {stage.name: self._activity(stage, threads, block_s, own_s) for stage in self.stages}
        if self.prefetch:
            parts[PREFETCH] = Activity(ROWS * BLOCKS, BLOCKS, BLOCKS * max(own_s, block_s - self.consumer_s))
        free = self.threads - sum(threads.values())
        wait_s = elapsed_s - consumer_s
        room = self.ram_bytes - self.buffered(threads)
        return Period(elapsed_s, wait_s, cpu_s + consumer_s, ROWS * BLOCKS, parts, free, room)

    def _activity(self, stage: Stage, threads: Mapping[str, int], block_s: float, own_s: float) -> Activity:
        awaited_s = max(0.0, block_s - own_s) if threads[stage.name] else 0.0
        size = BLOCKS * stage.block_bytes
        return Activity(ROWS * BLOCKS, BLOCKS, BLOCKS * stage.block_s, BLOCKS * awaited_s, size)


def random_pipeline(seed: int) -> Pipeline:
    """Stages of 0.5 to 20 ms a block: some compute without the GIL, some with it, some wait."""
    rng = random.Random(seed)
    stages = tuple(_random_stage(rng, f"map-{number}") for number in range(rng.randint(1, 3)))
    consumer_s = rng.choice([0.0, 10 ** rng.uniform(-4, -2)])
    ram_bytes = rng.choice([float("inf"), 16e6])
    return Pipeline(stages, 10 ** rng.uniform(-5, -3), consumer_s, rng.randint(1, 6), ram_bytes, rng.random() < 0.5)


def _random_stage(rng: random.Random, name: str) -> Stage:
    serial = rng.choice([0.0, rng.random(), 1.0])
    computing = 1.0 if serial else rng.choice([0.0, 1.0])
    return Stage(name, 10 ** rng.uniform(-3.3, -1.7), serial, computing, rng.choice([10_000, 1_000_000]))
