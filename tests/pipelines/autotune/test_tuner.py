from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest

from raydist.pipelines.autotune.model import Settings, workers_of
from raydist.pipelines.autotune.tuner import Period, Tuner
from tests.pipelines.autotune_simulator import Pipeline, all_settings, buffered, random_pipeline, simulate

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
def _simulated(pipeline: Pipeline, settings: tuple[tuple[str, Setting], ...]) -> Period:
    return simulate(pipeline, dict(settings))


def simulated(pipeline: Pipeline, settings: Settings) -> Period:
    return _simulated(pipeline, tuple(sorted(settings.items(), key=lambda item: item[0])))


def best_s(pipeline: Pipeline) -> float:
    return min(simulated(pipeline, settings).elapsed_s for settings in all_settings(pipeline))


@pytest.mark.parametrize("seed", range(30))
def test_it_comes_near_the_best_fixed_settings_and_keeps_the_limits(seed: int) -> None:
    pipeline = random_pipeline(seed)
    settled, used = tune(pipeline)
    assert max(workers_of(settings) for settings in used) <= pipeline.limits.workers
    assert max(buffered(pipeline, settings) for settings in used) <= pipeline.limits.ram_bytes
    assert simulated(pipeline, settled).elapsed_s <= 1.2 * best_s(pipeline)
