from __future__ import annotations

from dataclasses import replace

import pytest

from raydist.pipelines.autotune.costs import Cost, StagePeriod, learn
from raydist.pipelines.autotune.model import INLINE, StageSetting

ALONE = StagePeriod("map", INLINE, rows=100, blocks=10, busy_s=1.0, cpu_s=1.0, num_bytes=1000)


def after(*periods: StagePeriod, elapsed_s: float = 1.0) -> Cost:
    costs: dict[str, Cost] = {}
    for period in periods:
        costs = learn(costs, [period], elapsed_s)
    return costs["map"]


def on(place: str, workers: int, **changes: float) -> StagePeriod:
    return replace(ALONE, setting=StageSetting(place, workers), **changes)  # type: ignore[arg-type]  # a place


def test_inline_tells_what_a_row_takes() -> None:
    cost = after(ALONE)
    assert (cost.row_s, cost.block_rows, cost.block_bytes) == (0.01, 10, 100)
    assert after(ALONE, replace(ALONE, busy_s=2.0)).row_s == pytest.approx(0.013)


def test_what_computes_is_tried_on_two_threads_and_what_waits_on_many() -> None:
    assert after(ALONE).serial == 0.5
    assert after(replace(ALONE, cpu_s=0.0)).serial == 0.0


def test_threads_tell_how_much_of_the_work_holds_the_gil() -> None:
    assert after(ALONE, on("threads", 2)).serial == pytest.approx(1 / 8)
    held = after(ALONE, on("threads", 2, busy_s=2.0))
    assert (held.serial, held.proven) == (1.0, 1)
    assert after(ALONE, on("threads", 4), on("threads", 4, busy_s=2.0)).proven == 4


def test_one_thread_beside_a_busy_consumer_shows_that_both_hold_the_gil() -> None:
    costs = learn({}, [ALONE, replace(ALONE, name="other")], 2.0)
    costs = learn(costs, [on("threads", 1, busy_s=2.0), replace(ALONE, name="other", busy_s=2.0)], 2.0)
    assert costs["map"].serial == costs["other"].serial == 1.0


def test_a_hiccup_of_the_machine_is_not_taken_for_contention() -> None:
    assert after(ALONE, replace(ALONE, busy_s=9.0), elapsed_s=9.0).serial == pytest.approx(0.5, abs=0.01)


def test_what_threads_told_is_forgotten_slowly() -> None:
    held = [ALONE, on("threads", 2, busy_s=2.0)]
    assert after(*held, *[ALONE] * 10).serial > 0.9
    assert after(*held, *[ALONE] * 500).serial < 0.6


def test_nothing_is_quicker_beside_others_than_alone() -> None:
    assert after(ALONE, on("threads", 2, busy_s=0.2)).row_s == pytest.approx(0.002)


def test_actors_that_are_waited_for_tell_what_moving_takes() -> None:
    cost = after(ALONE, on("actors", 2, awaited_s=0.5), elapsed_s=0.6)
    assert cost.call_s == pytest.approx(10 * (2 * 0.6 / 100 - 0.01))
    idle = after(ALONE, on("actors", 2, awaited_s=0.0), elapsed_s=0.6)
    assert idle.call_s == after(ALONE).call_s


def test_a_period_without_work_tells_nothing() -> None:
    assert learn({}, [replace(ALONE, rows=0)], 1.0) == {}
    assert after(ALONE, on("threads", 2, rows=0)) == after(ALONE)


def test_the_work_of_a_period() -> None:
    work = after(ALONE).work(replace(ALONE, rows=50))
    assert (work.seconds, work.block_bytes) == (0.5, 100)
    assert work.moving_s == pytest.approx(5 * after(ALONE).call_s)


def test_work_that_can_be_handed_over_at_a_time() -> None:
    assert Cost(1e-6, 0.5, 0.0, block_rows=1, block_bytes=8).handed_over_s == pytest.approx(0.004096)
    assert Cost(0.001, 0.5, 0.0, block_rows=2, block_bytes=4 << 20).handed_over_s == pytest.approx(0.004)
    assert Cost(0.001, 0.5, 0.0, block_rows=1, block_bytes=64 << 20).handed_over_s == 0.001
