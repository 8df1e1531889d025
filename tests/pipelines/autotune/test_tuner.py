from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest

from raydist.pipelines.autotune.costs import StagePeriod
from raydist.pipelines.autotune.model import INLINE, Knob, Limits, Settings, StageSetting, workers_of
from raydist.pipelines.autotune.tuner import Period, Tuner
from tests.pipelines.autotune.simulator import Pipeline, all_settings, buffered, random_pipeline, simulate

PERIODS = 200
FEWEST = 0.97  # of what was measured, where measuring is disturbed
MOST = 1.05


def tune(pipeline: Pipeline, noise: random.Random | None = None) -> tuple[Settings, list[Settings]]:
    """What the tuner settles on, and all that it tried."""
    tuner = Tuner(pipeline.limits)
    for knob in pipeline.knobs():
        tuner.add(knob)
    used: list[Settings] = [dict(tuner.settings)]
    while len(used) < PERIODS or tuner.is_trying:
        period = simulated(pipeline, tuner.settings)
        factor = noise.uniform(FEWEST, MOST) if noise else 1.0
        tuner.step(replace(period, elapsed_s=factor * period.elapsed_s))
        used.append(dict(tuner.settings))
    return used[-1], used


@functools.cache
def _simulated(pipeline: Pipeline, settings: tuple[tuple[str, StageSetting], ...]) -> Period:
    return simulate(pipeline, dict(settings))


def simulated(pipeline: Pipeline, settings: Settings) -> Period:
    return _simulated(pipeline, tuple(sorted(settings.items(), key=lambda item: item[0])))


def best_s(pipeline: Pipeline) -> float:
    return min(simulated(pipeline, settings).elapsed_s for settings in all_settings(pipeline))


@pytest.mark.parametrize("seed", range(30))
def test_it_comes_near_the_best_fixed_settings_and_keeps_the_limits(seed: int) -> None:
    pipeline = random_pipeline(seed)
    settled, used = tune(pipeline, random.Random(seed))
    assert max(workers_of(settings) for settings in used) <= pipeline.limits.workers
    assert max(buffered(pipeline, settings) for settings in used) <= pipeline.limits.ram_bytes
    assert simulated(pipeline, settled).elapsed_s <= 1.2 * best_s(pipeline)


ONE = StagePeriod("map", INLINE, rows=100, blocks=10, busy_s=0.9, cpu_s=0.9)


def tuner_of(workers: int = 4) -> Tuner:
    tuner = Tuner(Limits(workers))
    tuner.add(Knob("map"))
    return tuner


def period_of(tuner: Tuner, speedup: float = 1.0, wait: float = 1.0) -> Period:
    """A second, in which threads did so many times the work that one does inline."""
    setting = tuner.settings["map"]
    if not setting.workers:
        return Period(1.0, wait, 1 - wait, [ONE])
    rows, busy_s = int(100 * speedup), 0.9 * setting.workers
    return Period(1.0, wait, 1 - wait, [replace(ONE, setting=setting, rows=rows, busy_s=busy_s, awaited_s=0.9)])


def changes(tuner: Tuner, count: int, speedup: float = 1.0, wait: float = 1.0) -> list[StageSetting]:
    """Where the stage was, without repetitions."""
    seen = [tuner.settings["map"]]
    for _ in range(count):
        tuner.step(period_of(tuner, speedup, wait))
        if tuner.settings["map"] != seen[-1]:
            seen.append(tuner.settings["map"])
    return seen


def test_nothing_changes_while_the_consumer_does_not_wait() -> None:
    assert changes(tuner_of(), 50, wait=0.04) == [INLINE]


def test_short_pipelines_stay_undisturbed() -> None:
    assert changes(tuner_of(), 9) == [INLINE]


def test_what_helps_stays_and_is_compared_with_inline_ever_more_rarely() -> None:
    two = StageSetting("threads", 2)
    seen = changes(tuner_of(2), 200, speedup=1.9)
    assert seen == [INLINE, two, INLINE, two, INLINE, two]


def test_a_comparison_that_finds_what_was_known_is_short() -> None:
    tuner, count = tuner_of(2), 0
    while changes(tuner, 1, speedup=1.9)[-1] == INLINE:
        count += 1
        assert count < 20
    while changes(tuner, 1, speedup=1.9)[-1] != INLINE:
        count += 1
        assert count < 100
    for inline in (True, False):  # the first period still holds blocks of threads, the second one is judged
        assert (changes(tuner, 1, speedup=1.9)[-1] == INLINE) is inline


def test_what_does_not_help_is_taken_back_and_tried_ever_more_rarely() -> None:
    tuner = tuner_of()
    first, later = changes(tuner, 50, speedup=0.9), changes(tuner, 50, speedup=0.9)
    assert first[-1] == later[-1] == INLINE
    assert 1 < len(first) <= 7
    assert len(later) < len(first)


def test_what_stops_helping_goes_back_to_inline() -> None:
    tuner = tuner_of(2)
    assert changes(tuner, 20, speedup=1.9)[-1].workers == 2
    assert changes(tuner, 60, speedup=0.7)[-1] == INLINE


@pytest.mark.parametrize(("comparisons", "stays"), [(1, True), (2, False)])
def test_one_disturbed_comparison_moves_nothing_that_helped_by_far(comparisons: int, stays: bool) -> None:
    """Inline seems better where something else took the cores while threads were watched."""
    tuner = tuner_of(2)
    assert changes(tuner, 20, speedup=1.9)[-1].workers == 2
    compared = 0
    while compared < comparisons:
        before = tuner.settings["map"]
        tuner.step(period_of(tuner, speedup=0.8))
        compared += before.workers and not tuner.settings["map"].workers
    seen = changes(tuner, 4, speedup=0.8)  # the trial to its end
    assert seen[-1].workers == (2 if stays else 0)
    assert not stays or changes(tuner, 60, speedup=1.9)[-1].workers == 2


def test_lower_limits_hold_at_once() -> None:
    tuner = tuner_of(4)
    changes(tuner, 12, speedup=1.9)
    tuner.limits = Limits(0)
    tuner.settings["map"] = INLINE  # what could be carried out
    assert changes(tuner, 50, speedup=1.9) == [INLINE]


def test_a_trial_that_was_not_judged_is_taken_back() -> None:
    tuner = tuner_of()
    while not tuner.is_trying:
        tuner.step(period_of(tuner))
    assert tuner.settings["map"].workers
    tuner.pause()
    assert tuner.settings["map"] == INLINE


def test_changes_tell_what_and_why() -> None:
    tuner = tuner_of(2)
    whys = [change.why for _ in range(20) if (change := tuner.step(period_of(tuner, speedup=0.5))) is not None]
    assert whys[0] == "map 2 threads: the consumer waits 100% of the time"
    assert whys[1] == "map inline: map 2 threads gave -50%"


def placed(row_s: float, row_bytes: int) -> set[StageSetting]:
    """Where a stage has been that waits, so that threads would gain all of its time, after a while."""
    tuner = tuner_of()
    rows = 100
    period = StagePeriod("map", INLINE, rows, rows, rows * row_s, cpu_s=0.0, num_bytes=rows * row_bytes)
    seen = set()
    for _ in range(40):
        stage = replace(period, setting=tuner.settings["map"])
        tuner.step(Period(rows * row_s, rows * row_s, 0.0, [stage]))
        seen.add(tuner.settings["map"])
    return seen


def test_a_slow_function_goes_to_threads_and_one_whose_blocks_are_not_worth_it_does_not() -> None:
    assert placed(0.002, 1 << 20) > {INLINE}
    assert placed(0.00002, 100) > {INLINE}, "thousands of them are given to a thread at a time"
    assert placed(0.00002, 1 << 20) == {INLINE}
