"""Counters of stages, and the statistics made of them: rates, who waits for whom, the bottleneck."""

from __future__ import annotations

import time

import numpy as np

from raydist import Dataset, Options
from raydist.options import AutotuneOptions, OptimizationOptions
from raydist.pipelines.elements.items import StageResult
from raydist.pipelines.metering.iteration_meters import IterationMeters
from raydist.pipelines.metering.meter import Meter, Reading
from raydist.pipelines.metering.stats import (
    CONSUMER,
    HANDING_OVER,
    PipelineStats,
    StageStats,
    find_bottleneck,
    stats_of,
    summarise,
    threads_of,
)
from tests.contracts.op import collect, iterate
from tests.pipelines.storing_executor import StoringExecutor


def test_times_of_a_stage() -> None:
    meter = Meter("map-1")
    meter.own_s, meter.awaited_s, meter.input_s = 3.0, 1.0, 5.0
    reading = meter.read()  # own work is what is left of the time in the consumer's thread
    assert (reading.busy_s, reading.wait_s, reading.input_wait_s, reading.handling_s) == (2.0, 6.0, 5.0, 0.0)
    meter = Meter("map-1")
    meter.own_s, meter.awaited_s = 3.0, 2.5
    meter.worked(StageResult((), (4,), ("",), begun_at=100.0, busy_s=8.0, cpu_s=7.0, worker="thread-7"), here=False)
    reading = meter.read()
    assert (reading.busy_s, reading.handling_s, reading.cpu_s) == (8.5, 0.5, 7.0)
    meter = Meter("interleave-1")
    meter.own_s = 3.0
    meter.inside = Meter("")
    meter.inside.awaited_s = 2.5
    meter.inside.read_ahead(6.0)
    reading = meter.read()  # work ahead inside of a function counts as the operation's
    assert (reading.busy_s, reading.handling_s, reading.wait_s) == (6.5, 0.5, 2.5)
    now = 0.0
    meter = Meter("map-1", clock=lambda: now)
    now = 3.0  # with one worker until here
    meter.parallelism = 4
    now = 4.0
    reading = meter.read()
    assert (reading.parallelism, reading.mean_parallelism, reading.workers) == (4, 7 / 4, 7 / 4)


PLAIN = Options(optimization=OptimizationOptions(inject_prefetch=False), autotune=AutotuneOptions(enabled=False))


def named(readings: tuple[Reading, ...]) -> dict[str, Reading]:
    return {reading.name: reading for reading in readings}


def test_two_stages_of_one_name_stay_apart() -> None:
    meters = IterationMeters()
    meters.meter("memory-0", owner=("RangeOp",))
    assert meters.meter("memory-0", owner=("GatherOp",)).name == "memory-0*"
    assert [reading.name for reading in meters.readings()] == ["memory-0", "memory-0*"]
    source = Dataset.from_tensor_slices(np.arange(10)).map(lambda x: x)
    iterator = Dataset.zip((source, source)).as_numpy_iterator()  # one dataset that is read twice is counted twice
    list(iterator)
    readings = iterator.meters.readings()
    assert len(readings) == len({reading.name for reading in readings})
    assert named(readings)["zip-2"].elements == 10
    off = IterationMeters(enabled=False)
    assert off.meter("range-0") is off.meter("map-1")
    assert off.readings() == ()
    assert off.inside("range-0") is off


def test_totals_can_begin_again_and_go_on_after_an_engine_was_closed() -> None:
    iterator = Dataset.range(100).batch(2).as_numpy_iterator()
    next(iterator)
    iterator.meters.begin_again()
    assert iterator.meters.elapsed_s == 0.0
    assert [reading.elements for reading in iterator.meters.readings()] == [0, 0]
    beginning = iterator.state_dict()
    list(iterator)
    assert named(iterator.meters.readings())["batch-1"].elements == 49
    assert iterator.meters.elapsed_s > 0.0
    iterator.load_state_dict(beginning)
    list(iterator)
    assert named(iterator.meters.readings())["batch-1"].elements == 98


def test_an_iteration_counts_elements_and_bytes_of_every_stage() -> None:
    def slow(x: int) -> int:
        time.sleep(1e-3)
        return x + 1

    dataset = Dataset.range(100).map(slow).filter(lambda x: x % 2 == 0).batch(10)
    iterator = dataset.with_options(PLAIN).as_numpy_iterator()
    assert len(list(iterator)) == 5
    readings = named(iterator.meters.readings())
    counts = {name: (reading.elements, reading.bytes) for name, reading in readings.items()}
    assert counts == {"range-0": (100, 800), "map-1+filter-2": (50, 400), "batch-3": (5, 400)}
    assert readings["batch-3"].inputs == ("map-1+filter-2",)
    assert readings["map-1+filter-2"].inputs == ("range-0",)
    assert [reading.kind for reading in readings.values()] == ["source", "stage", "stage"]
    assert sum(reading.busy_s for reading in readings.values()) <= iterator.meters.elapsed_s, "seconds count once"


def test_datasets_inside_a_function_make_no_meters() -> None:
    iterator = Dataset.range(50).flat_map(lambda x: Dataset.range(int(x)).map(lambda y: y)).as_numpy_iterator()
    list(iterator)
    readings = named(iterator.meters.readings())
    assert list(readings) == ["range-0", "flat_map-1"]
    assert readings["flat_map-1"].busy_s > readings["range-0"].busy_s


def test_threads_report_their_work() -> None:
    iterator = Dataset.range(4000).map(lambda x: x + 1, num_parallel_calls=2).as_numpy_iterator()
    list(iterator)
    reading = named(iterator.meters.readings())["map-1"]
    assert (reading.place, reading.parallelism, reading.buffered) == ("threads", 2, 0)
    assert reading.cpu_s > 0.0
    assert reading.busy_s > reading.handling_s > 0.0
    assert reading.buffer_limit > 1

    def dataset(x: int) -> Dataset:
        return Dataset.range(200).map(lambda y: sum(range(500)))

    iterator = Dataset.range(4).interleave(dataset, cycle_length=2, num_parallel_calls=2).as_numpy_iterator()
    list(iterator)
    reading = named(iterator.meters.readings())["interleave-1"]
    assert (reading.place, reading.parallelism, reading.kind) == ("threads", 2, "stage")
    assert reading.busy_s > 0.0
    assert reading.wait_s - reading.input_wait_s > 0.0


SOURCE = Reading("range-0", "range(9)", kind="source", elements=100, bytes=800, bytes_here=800, busy_s=1.0)

MAP = Reading(
    "map-1",
    "map(f)",
    ("range-0",),
    elements=100,
    bytes=400,
    bytes_here=400,
    errors=3,
    busy_s=6.5,
    handling_s=0.5,
    cpu_s=3.0,
    wait_s=7.0,
    input_wait_s=1.0,
    parallelism=2,
    buffer_limit=8,
    mean_buffered=6.0,
    place="threads",
)

PREFETCH = Reading(
    "prefetch-2", "prefetch(4)", ("map-1",), kind="prefetch", wait_s=1.0, buffer_limit=4, mean_buffered=4.0, elements=50
)


def stage(stats: PipelineStats, name: str) -> StageStats:
    return next(stage for stage in stats.stages if stage.name == name)


def test_rates_shares_and_who_waits_for_whom() -> None:
    stats = summarise([SOURCE, MAP, PREFETCH], elapsed_s=10.0, consumer_busy_s=9.0)
    mapped = stage(stats, "map-1")
    assert (mapped.elements_per_s, mapped.bytes_per_s, mapped.errors) == (10.0, 40.0, 3)
    assert (mapped.busy, mapped.cpu, mapped.queue_fill) == (0.325, 0.5, 0.75)
    assert stage(stats, "range-0").cpu is None
    assert (stats.elements, stats.consumer_waited) == (50, 0.1)
    waits = [(row.name, row.waits_for, row.waiting) for row in stats.stages]
    assert waits == [("range-0", "map-1", 0.9), ("map-1", "its workers", 0.6), ("prefetch-2", "consumer", 0.9)]


def test_the_bottleneck_and_why() -> None:
    stats = summarise([SOURCE, MAP], elapsed_s=4.0)
    assert (stats.bottleneck, stats.because) == ("map-1", "its 2 threads: busy 75 % of the time")
    stats = summarise([SOURCE], elapsed_s=4.0, consumer_busy_s=3.0)
    assert stats.bottleneck == "consumer"
    assert stats.because == "75 % of the work of the consumer's thread, which was busy 100 % of the time"
    alone = summarise([Reading("range-0", "range", busy_s=1.0)], elapsed_s=2.0)
    assert alone.because == "the consumer's thread: busy 50 % of the time"


def test_the_text_shows_stages_bottleneck_and_decisions() -> None:
    text = str(summarise([SOURCE, MAP], elapsed_s=4.0, decisions=["map-1: 1 -> 2 threads, it was busy"]))
    lines = text.splitlines()
    assert lines[0] == "100 elements in 4.00 s, 25 a second; the consumer waited 100 % of the time."
    assert lines[3].split()[:2] == ["range-0", "inline"]
    assert "2 threads" in lines[4]
    assert lines[-2].startswith("Bottleneck: map-1 (its 2 threads: busy")
    assert lines[-1] == "Autotune: map-1: 1 -> 2 threads, it was busy"


def test_nothing_ran() -> None:
    assert stats_of(None) == stats_of(IterationMeters()) == PipelineStats()
    assert str(stats_of(None)) == "Nothing has run yet: iterate over the dataset first."
    assert summarise([SOURCE], elapsed_s=0.0).stages[0].elements_per_s == 0.0


def test_bytes_that_stay_with_workers_are_told() -> None:
    dataset = Dataset.range(40).map(lambda x: x).shuffle(5, seed=1).batch(4)
    iterator = iterate(dataset, StoringExecutor)
    collect(iterator)
    stats = iterator.stats()
    assert [(each.bytes, each.bytes_here) for each in stats.stages[:4]] == [(320, 320), (320, 0), (320, 0), (320, 0)]
    assert "shuffle-2: 100 % of 0.0 MB stayed with input workers." in str(stats)
    list(dataset)
    assert "stayed" not in str(dataset.stats())


ONE_SECOND = Reading("range-0", "range", kind="source", busy_s=1.0)
TWO_SECONDS = Reading("map-1", "map", ("range-0",), busy_s=2.0)
AHEAD = Reading("prefetch-2", "prefetch", ("map-1",), kind="prefetch", busy_s=0.1)
BATCH = Reading("batch-3", "batch", ("prefetch-2",), busy_s=2.5)


def test_who_is_the_bottleneck() -> None:
    stages = [ONE_SECOND, TWO_SECONDS, AHEAD, BATCH]
    found = find_bottleneck(stages)  # stages of one thread count together
    assert (found.name, found.where, found.busy_s, found.share) == ("map-1", "the thread of prefetch-2", 3.0, 2 / 3)
    found = find_bottleneck(stages, consumer_busy_s=0.5, convert_s=0.4)
    assert (found.name, found.where) == ("batch-3", "the consumer's thread")
    assert find_bottleneck([ONE_SECOND], consumer_busy_s=9.0).name == CONSUMER
    assert find_bottleneck([ONE_SECOND], convert_s=9.0).name == HANDING_OVER
    parallel = Reading("map-1", "map", ("range-0",), busy_s=8.5, handling_s=0.5, parallelism=4, place="actors")
    found = find_bottleneck([ONE_SECOND, parallel])  # workers share their work
    assert (found.name, found.where, found.busy_s, found.share) == ("map-1", "its 4 actors", 2.0, 1.0)
    found = find_bottleneck([Reading("range-0", "range", busy_s=3.0), parallel])
    assert (found.name, found.where, found.busy_s) == ("range-0", "the consumer's thread", 3.5)
    zipped = Reading("zip-5", "zip", ("batch-3", "range-4"))
    threads = threads_of([*stages, Reading("range-4", "range"), zipped])
    assert {threads[name] for name in ("range-0", "map-1")} == {"the thread of prefetch-2"}
    assert {threads[name] for name in ("prefetch-2", "batch-3", "range-4", "zip-5")} == {"the consumer's thread"}
