from __future__ import annotations

import random
from dataclasses import replace

import pytest

from raydist.pipelines.autotune.tuner import TunedSetting, Tuner
from tests.pipelines.autotune.simulator import Pipeline, Stage, random_pipeline

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


def test_nothing_changes_while_the_consumer_does_not_wait() -> None:
    slow_consumer = replace(SECOND_CORE, consumer_s=0.3)
    assert run(tuner_of(slow_consumer), slow_consumer, 100) == [{"map": 0}]


def test_short_pipelines_stay_undisturbed() -> None:
    assert run(tuner_of(SECOND_CORE), SECOND_CORE, 15) == [{"map": 0}]


def test_what_waits_gets_all_threads_at_once() -> None:
    waiting = Pipeline((Stage("map", 0.01, computing=0.0),), threads=16)
    assert run(tuner_of(waiting), waiting, 3) == [{"map": 0}, {"map": 16}]


def test_what_helps_by_far_is_not_compared_soon() -> None:
    waiting = Pipeline((Stage("map", 0.01, computing=0.0),), threads=16)
    assert run(tuner_of(waiting), waiting, 1000) == [{"map": 0}, {"map": 16}]


def test_what_computes_gets_twice_as_many_threads_while_that_helps() -> None:
    computing = Pipeline((Stage("map", 0.01, serial=0.24),), threads=16)
    seen = run(tuner_of(computing), computing, 35)
    assert seen == [{"map": 0}, {"map": 2}, {"map": 4}, {"map": 8}, {"map": 4}]


def test_what_helps_stays_and_is_compared_with_no_threads_ever_more_rarely() -> None:
    tuner = tuner_of(SECOND_CORE)
    assert run(tuner, SECOND_CORE, 400) == [{"map": 0}, *([{"map": 2}, {"map": 0}] * 3), {"map": 2}]


def test_what_does_not_help_is_taken_back_and_tried_ever_more_rarely() -> None:
    tuner = tuner_of(WITH_GIL)
    first, later = run(tuner, WITH_GIL, 200), run(tuner, WITH_GIL, 200)
    assert first[-1] == later[-1] == {"map": 0}
    assert 1 < len(later) <= len(first) <= 9


def test_what_stops_helping_loses_its_threads() -> None:
    tuner = tuner_of(SECOND_CORE)
    assert run(tuner, SECOND_CORE, 30)[-1] == {"map": 2}
    assert run(tuner, replace(SECOND_CORE, stages=WITH_GIL.stages), 60)[-1] == {"map": 0}


def test_a_prefetch_helps_a_consumer_that_works() -> None:
    pipeline = Pipeline((Stage("map", 0.01, serial=0.5),), consumer_s=0.01, threads=1, prefetch=True)
    assert run(tuner_of(pipeline), pipeline, 40)[-1] == {"map": 0, "prefetch": 1}
    idle_consumer = replace(pipeline, consumer_s=0.0001)
    assert all(not threads["prefetch"] for threads in run(tuner_of(idle_consumer), idle_consumer, 100))


def test_threads_that_were_asked_for_need_no_budget() -> None:
    tuner = tuner_of(SECOND_CORE)
    tuner.add(TunedSetting("interleave", ahead=8, requested=True))
    period = replace(SECOND_CORE.period({"map": 0}), cpu_s=0.0, free_threads=0)
    period = replace(period, parts={"interleave": period.parts["map"]})
    for _ in range(3):
        tuner.step(period)
    assert tuner.threads == {"map": 0, "interleave": 8}


def test_a_trial_without_a_result_is_undone() -> None:
    tuner = tuner_of(SECOND_CORE)
    while not tuner.threads["map"]:
        tuner.step(SECOND_CORE.period(tuner.threads))
    tuner.pause()
    assert tuner.threads == {"map": 0}


def test_decisions_tell_what_and_why() -> None:
    tuner = tuner_of(WITH_GIL)
    decisions = [tuner.step(WITH_GIL.period(tuner.threads)) for _ in range(22)]
    whys = [decision.why for decision in decisions if decision is not None]
    assert whys == ["map 2 threads: the consumer waits 100% of the time", "map inline: map 2 threads gave +0%"]


@pytest.mark.parametrize(
    ("row_s", "row_bytes", "moves"), [(0.002, 1 << 20, True), (0.00002, 100, True), (0.00002, 1 << 20, False)]
)
def test_work_that_is_worth_a_thread_in_blocks_as_large_as_possible_goes_to_threads(
    row_s: float, row_bytes: int, moves: bool
) -> None:
    pipeline = Pipeline((Stage("map", 16 * row_s, computing=0.0, block_bytes=16 * row_bytes),))
    assert (run(tuner_of(pipeline), pipeline, 3)[-1]["map"] > 0) is moves
