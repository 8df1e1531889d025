from __future__ import annotations

from raydist.pipelines.elements.items import StageResult
from raydist.pipelines.metering.meter import Meter


def result(busy_s: float, cpu_s: float) -> StageResult:
    return StageResult((), (4,), ("",), begun_at=100.0, busy_s=busy_s, cpu_s=cpu_s, worker="thread-7")


def test_own_work_is_what_is_left_of_the_time_in_the_consumers_thread() -> None:
    meter = Meter("map-1")
    meter.own_s, meter.awaited_s, meter.input_s = 3.0, 1.0, 5.0
    reading = meter.read()
    assert (reading.busy_s, reading.wait_s, reading.input_wait_s, reading.handling_s) == (2.0, 6.0, 5.0, 0.0)


def test_work_of_workers_is_added_to_the_handling() -> None:
    meter = Meter("map-1")
    meter.own_s, meter.awaited_s = 3.0, 2.5
    meter.worked(result(busy_s=8.0, cpu_s=7.0), here=False)
    reading = meter.read()
    assert (reading.busy_s, reading.handling_s, reading.cpu_s) == (8.5, 0.5, 7.0)


def test_work_in_the_consumers_thread_counts_once() -> None:
    meter = Meter("map-1")
    meter.own_s = 3.0
    meter.worked(result(busy_s=2.5, cpu_s=2.0), here=True)
    assert meter.read().busy_s == 3.0


def test_a_block_under_way_makes_no_negative_numbers() -> None:
    meter = Meter("prefetch-1")
    meter.awaited_s = 2.0  # `own_s` follows when the call returns
    assert meter.read().busy_s == 0.0


def test_workers_are_averaged_over_the_time() -> None:
    now = 0.0
    meter = Meter("map-1", clock=lambda: now)
    now = 3.0  # with one worker until here
    meter.parallelism = 4
    now = 4.0
    reading = meter.read()
    assert (reading.parallelism, reading.mean_parallelism, reading.workers) == (4, 7 / 4, 7 / 4)


def test_work_ahead_inside_a_function_counts_as_the_operations() -> None:
    meter = Meter("interleave-1")
    meter.own_s = 3.0
    meter.inside = Meter("")
    meter.inside.awaited_s = 2.5
    meter.inside.read_ahead(6.0)
    reading = meter.read()
    assert (reading.busy_s, reading.handling_s, reading.wait_s) == (6.5, 0.5, 2.5)
