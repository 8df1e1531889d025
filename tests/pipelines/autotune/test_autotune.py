"""Decisions of the autotuner on a model of pipelines, and on stages that sleep."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from raydist.core.errors import CancelledError
from raydist.dataset import Dataset
from raydist.options import AutotuneOptions, Options, ThreadingOptions
from raydist.pipelines.autotune.tuned_executor import (
    TunedExecutor,
    TunedStage,
    local_executor,
)
from raydist.pipelines.autotune.tuner import BLOCKS_PER_THREAD, Activity, Period, TunedSetting, Tuner
from raydist.pipelines.engine.budget import Budgets
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.engine.threads import ThreadExecutor
from raydist.pipelines.metering.iteration_meters import IterationMeters
from raydist.pipelines.run.iterator import DatasetIterator
from tests.contracts.op import iterate
from tests.pipelines.engine.toy_stages import SOURCE, block_of, spec_of

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


SECOND_CORE = Pipeline((Stage("map", 0.01),), threads=2)
WITH_GIL = Pipeline((Stage("map", 0.01, serial=1.0),))


def tuner_of(pipeline: Pipeline) -> Tuner:
    tuner = Tuner()
    for setting in pipeline.tuned():
        tuner.add(setting)
    return tuner


def run(tuner: Tuner, pipeline: Pipeline, count: int, noise: random.Random | None = None) -> list[dict[str, int]]:
    """The settings of all periods, without repetitions."""
    seen = [dict(tuner.threads)]
    for _ in range(count):
        tuner.step(pipeline.period(tuner.threads, noise.uniform(0.98, 1.03) if noise else 1.0))
        if tuner.threads != seen[-1]:
            seen.append(dict(tuner.threads))
    return seen


def settled(seed: int) -> float:
    """Time with the settings after 400 periods, as a multiple of the best one. The limits hold all the time."""
    pipeline = random_pipeline(seed)
    tuner = tuner_of(pipeline)
    used = run(tuner, pipeline, 400, random.Random(seed))
    assert max(sum(threads.values()) for threads in used) <= pipeline.threads
    assert max(pipeline.buffered(threads) for threads in used) <= pipeline.ram_bytes
    tuner.pause()
    best_s = min(pipeline.seconds(threads)[0] for threads in pipeline.settings())
    return pipeline.seconds(tuner.threads)[0] / best_s


def test_it_comes_near_the_best_settings_and_keeps_the_limits() -> None:
    factors = sorted(settled(seed) for seed in range(100))
    assert factors[90] <= 1.1
    assert factors[96] <= 1.25
    assert factors[-1] <= 2.0


def settings_of(pipeline: Pipeline, count: int) -> list[int]:
    """Threads of the only stage in all periods, without repetitions."""
    return [threads["map"] for threads in run(tuner_of(pipeline), pipeline, count)]


def test_when_threads_are_tried_and_how_many() -> None:
    """Not while the consumer does not wait, nor in short pipelines; many at once for what waits and helps by far."""
    waiting = Pipeline((Stage("map", 0.01, computing=0.0),), threads=16)
    computing = Pipeline((Stage("map", 0.01, serial=0.24),), threads=16)
    assert settings_of(replace(SECOND_CORE, consumer_s=0.3), 100) == [0]
    assert settings_of(SECOND_CORE, 15) == [0]
    assert settings_of(waiting, 3) == settings_of(waiting, 1000) == [0, 16]
    assert settings_of(computing, 35) == [0, 2, 4, 8, 4]


def test_what_helps_stays_and_is_compared_with_no_threads_ever_more_rarely() -> None:
    assert settings_of(SECOND_CORE, 400) == [0, *([2, 0] * 3), 2]
    tuner = tuner_of(SECOND_CORE)
    assert run(tuner, SECOND_CORE, 30)[-1] == {"map": 2}
    assert run(tuner, replace(SECOND_CORE, stages=WITH_GIL.stages), 60)[-1] == {"map": 0}


def test_what_does_not_help_is_taken_back_and_tried_ever_more_rarely() -> None:
    tuner = tuner_of(WITH_GIL)
    first, later = run(tuner, WITH_GIL, 200), run(tuner, WITH_GIL, 200)
    assert first[-1] == later[-1] == {"map": 0}
    assert 1 < len(later) <= len(first) <= 9
    tuner = tuner_of(SECOND_CORE)
    while not tuner.threads["map"]:
        tuner.step(SECOND_CORE.period(tuner.threads))
    tuner.pause()  # a trial without a result is undone
    assert tuner.threads == {"map": 0}


def test_a_prefetch_helps_a_consumer_that_works() -> None:
    pipeline = Pipeline((Stage("map", 0.01, serial=0.5),), consumer_s=0.01, threads=1, prefetch=True)
    assert run(tuner_of(pipeline), pipeline, 40)[-1] == {"map": 0, "prefetch": 1}
    idle_consumer = replace(pipeline, consumer_s=0.0001)
    assert all(not threads["prefetch"] for threads in run(tuner_of(idle_consumer), idle_consumer, 100))


def test_decisions_tell_what_and_why() -> None:
    tuner = tuner_of(WITH_GIL)
    decisions = [tuner.step(WITH_GIL.period(tuner.threads)) for _ in range(22)]
    whys = [decision.why for decision in decisions if decision is not None]
    assert whys == ["map 2 threads: the consumer waits 100% of the time", "map inline: map 2 threads gave +0%"]


def test_work_that_is_worth_a_thread_in_blocks_as_large_as_possible_goes_to_threads() -> None:
    for row_s, row_bytes, moves in ((0.002, 1 << 20, True), (0.00002, 100, True), (0.00002, 1 << 20, False)):
        pipeline = Pipeline((Stage("map", 16 * row_s, computing=0.0, block_bytes=16 * row_bytes),))
        assert (settings_of(pipeline, 3)[-1] > 0) is moves


def map_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("raydist-map")]


def slow(x: int) -> int:
    time.sleep(0.001)
    return x + 1


def slower(x: int) -> int:
    time.sleep(0.004)
    return x + 1


def until_threads(iterator: Iterator[int], most: int = 2000) -> list[int]:
    """Elements up to the first that is made on a thread."""
    elements: list[int] = []
    while not map_threads() and len(elements) < most:
        elements.append(int(next(iterator)))
    return elements


def tuned(dataset: Dataset, tuners: list[Tuner] | None = None) -> DatasetIterator[Any]:
    return iterate(dataset, lambda options: TunedExecutor(tuners))


def test_a_stage_that_waits_moves_to_threads_and_gives_the_same_elements() -> None:
    with_budget = Options(autotune=AutotuneOptions(cpu_budget=3))
    iterator = tuned(Dataset.range(1000).map(slow).with_options(with_budget))
    assert [int(x) for x in iterator] == list(range(1, 1001))
    (reading,) = [reading for reading in iterator.meters.readings() if reading.place != "inline"]
    assert (reading.place, reading.parallelism) == ("threads", 3)
    assert iterator.meters.decisions[0].startswith("map-1 3 threads: the consumer waits")
    iterator.close()
    assert not map_threads()


def test_a_state_fits_and_the_next_iteration_begins_with_what_was_learned() -> None:
    tuners: list[Tuner] = []
    dataset = Dataset.range(5000).map(slower).with_options(Options(autotune=AutotuneOptions(cpu_budget=2)))
    first = tuned(dataset, tuners)
    seen = until_threads(first)
    state = first.state_dict()
    following = [int(next(first)) for _ in range(200)]
    first.close()
    resumed = iterate(dataset)
    resumed.load_state_dict(state)
    assert [int(next(resumed)) for _ in range(15)] == following[:15] == list(range(len(seen) + 1, len(seen) + 16))
    resumed.close()
    (tuner,) = tuners
    tuner.threads["map-1"] = 2  # a busy machine may have stopped the first iteration in the middle of a trial
    second = tuned(dataset, tuners)
    assert int(next(second)) == 1
    threads = map_threads()
    assert len(threads) == 2
    del second  # an abandoned iterator ends its threads
    gc.collect()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_a_parallelism_that_was_asked_for_is_kept_and_counts_in_the_budget() -> None:
    for calls in (1, 2):
        iterator = tuned(Dataset.range(300).map(slow, num_parallel_calls=calls))
        assert [int(x) for x in iterator] == list(range(1, 301))
        assert iterator.meters.decisions == []
    most = 0

    def watched(x: int) -> int:
        nonlocal most
        most = max(most, len(map_threads()))
        return slow(x)

    dataset = Dataset.range(600).map(watched, num_parallel_calls=2).map(watched)
    iterator = tuned(dataset.with_options(Options(autotune=AutotuneOptions(cpu_budget=3))))
    assert [int(x) for x in iterator] == list(range(2, 602))
    assert 2 <= most <= 3


def test_the_options_choose_the_executor_and_a_closed_one_takes_no_more_work() -> None:
    assert isinstance(local_executor(Options(autotune=AutotuneOptions(enabled=False))), InlineExecutor)
    assert isinstance(local_executor(Options(threading=ThreadingOptions(private_threadpool_size=0))), InlineExecutor)
    options = Options(threading=ThreadingOptions(private_threadpool_size=4))
    fixed = local_executor(options)
    assert isinstance(fixed, ThreadExecutor)
    assert fixed.window == 4
    options.autotune.cpu_budget = 1
    assert isinstance(local_executor(options), InlineExecutor)
    executor = local_executor(Options())
    assert isinstance(executor, TunedExecutor)
    assert executor.submit(WHERE, BLOCK, (0,)).result().items[0].num_rows == BLOCK.num_rows  # type: ignore[union-attr]
    executor.close()
    with pytest.raises(CancelledError, match="needs an open executor"):
        executor.submit(WHERE, BLOCK, (0,))


BLOCK = block_of(SOURCE)
WHERE = spec_of(SOURCE.map(lambda x: threading.current_thread() is threading.main_thread()))


def test_a_stage_takes_no_more_than_the_budgets_have_and_gives_it_back() -> None:
    budgets = Budgets(AutotuneOptions(cpu_budget=3, ram_budget=1000))
    made = TunedStage(IterationMeters().meter("map-1"), budgets, lambda part: None)
    budgets.threads.take(1)
    made.apply(5, row_s=0.0005, block_bytes=100)
    assert (made.threads, budgets.threads.free) == (2, 0)
    assert (made.charged_bytes, budgets.ram.free) == (400, 600)
    assert (made.place, made.num_workers, made.window, made.least_rows) == ("threads", 2, 4, 4)
    made.apply(0, row_s=0.0005, block_bytes=100)
    assert (made.threads, made.place, made.window, made.least_rows) == (0, "inline", 1, 1)
    made.end()
    assert (budgets.threads.free, budgets.ram.free) == (2, 1000)
