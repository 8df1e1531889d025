"""Counters of stages: elements, time, errors and events."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from raydist import Dataset, Options
from raydist.core.errors import UnavailableError
from raydist.core.nest import LEAF
from raydist.options import AutotuneOptions, OptimizationOptions
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import IteratorState, StageResult
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine import build as build_module
from raydist.pipelines.engine.build import MeteredIterator
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.metering.iteration_meters import IterationMeters
from raydist.pipelines.metering.meter import Event, EventLog, Meter, Reading
from raydist.pipelines.run.profile import chrome_trace


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
    dataset = Dataset.range(100).map(lambda x: x + 1).filter(lambda x: x % 2 == 0).batch(10)
    iterator = dataset.with_options(PLAIN).as_numpy_iterator()
    assert len(list(iterator)) == 5
    readings = named(iterator.meters.readings())
    counts = {name: (reading.elements, reading.bytes) for name, reading in readings.items()}
    assert counts == {"range-0": (100, 800), "map-1+filter-2": (50, 400), "batch-3": (5, 400)}
    assert readings["batch-3"].inputs == ("map-1+filter-2",)
    assert readings["map-1+filter-2"].inputs == ("range-0",)
    assert [reading.kind for reading in readings.values()] == ["source", "stage", "stage"]


def test_errors_are_counted_where_they_pass() -> None:
    iterator = Dataset.range(4).map(lambda x: 6 // (x - 1)).batch(1).ignore_errors().as_numpy_iterator()
    assert len(list(iterator)) == 3
    readings = named(iterator.meters.readings())
    assert [readings[name].errors for name in ("range-0", "map-1", "batch-2", "ignore_errors-3")] == [0, 1, 1, 0]


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


def test_a_prefetch_shows_its_queue() -> None:
    iterator = Dataset.range(100).prefetch(8).as_numpy_iterator()
    list(iterator)
    reading = named(iterator.meters.readings())["prefetch-1"]
    assert (reading.kind, reading.elements, reading.buffer_limit) == ("prefetch", 100, 8)
    assert reading.wait_s > reading.input_wait_s == 0.0  # the input works in the other thread


class Clock:
    """A replacement for the module `time` that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Worker(OpIterator):
    """An iterator that works for a second, then asks `source`."""

    def __init__(self, clock: Clock, source: OpIterator | None = None, error: Callable[[], Exception] | None = None):
        self.clock, self.source, self.error = clock, source, error
        self.closed = False

    def next_block(self, limit: int) -> Block:
        self.clock.now += 1.0
        if self.error is not None:
            raise self.error()
        if self.source is not None:
            return self.source.next_block(limit)
        return Block(LEAF, (TensorSpec((), np.dtype(np.int64)),), (np.zeros(3, np.int64),), 3)

    def state_dict(self) -> IteratorState:
        return {"at": self.clock.now}

    def load_state_dict(self, state: IteratorState) -> None:
        self.clock.now = state["at"]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(build_module, "time", clock)
    return clock


def test_own_time_is_without_that_of_the_inputs(clock: Clock) -> None:
    meters = IterationMeters()
    inner, outer = meters.meter("range-0"), meters.meter("map-1")
    # Something that is not metered stands between them: its second is the outer one's.
    between = Worker(clock, MeteredIterator(Worker(clock), inner, meters))
    source = MeteredIterator(Worker(clock, between), outer, meters)
    source.next_block(3)
    source.next_block(3)
    assert (inner.own_s, inner.input_s) == (2.0, 0.0)
    assert (outer.own_s, outer.input_s) == (4.0, 2.0)
    assert (outer.blocks, outer.elements, outer.bytes) == (2, 6, 48)
    assert meters.clock.inner_s == 6.0


def test_an_error_costs_time_and_is_counted_but_not_the_end_or_a_failed_machinery(clock: Clock) -> None:
    errors: list[tuple[Callable[[], Exception], int]] = [
        (lambda: ValueError("no"), 1),
        (StopIteration, 0),
        (lambda: UnavailableError("gone"), 0),
    ]
    for error, counted in errors:
        meters = IterationMeters()
        meter = meters.meter("map-1")
        with pytest.raises((ValueError, StopIteration, UnavailableError)):
            MeteredIterator(Worker(clock, error=error), meter, meters).next_block(1)
        assert (meter.errors, meter.own_s, meter.elements) == (counted, 1.0, 0)


def test_a_row_for_each_worker_and_a_bar_for_each_block() -> None:
    events = [
        Event("map-1", "worker-1", 100.5, 0.25, 64),
        Event("batch-2", "MainThread", 100.0, 1.0, 2),
        Event("range-0", "MainThread", 100.0, 0.125, 64),
    ]
    trace = json.loads(chrome_trace(events))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    assert names == {0: "MainThread", 1: "worker-1"}
    bars = [(e["name"], e["tid"], e["ts"], e["dur"], e["args"]["elements"]) for e in trace if e["ph"] == "X"]
    assert bars == [  # an outer bar comes before those inside it
        ("batch-2", 0, 0.0, 1e6, 2),
        ("range-0", 0, 0.0, 125_000.0, 64),
        ("map-1", 1, 500_000.0, 250_000.0, 64),
    ]


def test_workers_are_recorded_with_their_own_times() -> None:
    events = EventLog()
    meter = IterationMeters(events=events).meter("map-1")
    work = StageResult((), (4,), ("",), begun_at=100.0, busy_s=2.0, worker="input-3")
    meter.worked(work, here=False)
    meter.worked(work, here=True)  # the bar of the call around it shows that
    assert list(events) == [Event("map-1", "input-3", 100.0, 2.0, 4)]
