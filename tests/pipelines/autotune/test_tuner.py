from __future__ import annotations

import random
from dataclasses import replace

import pytest

from raydist.pipelines.autotune.model import Settings, workers_of
from raydist.pipelines.autotune.tuner import Tuner
from tests.pipelines.autotune_simulator import Pipeline, all_settings, buffered, random_pipeline, simulate

PERIODS = 120


def tune(pipeline: Pipeline, noise: random.Random | None = None) -> tuple[Settings, list[Settings]]:
    """What the tuner settles on, and all that it tried."""
    tuner = Tuner(pipeline.limits)
    for knob in pipeline.knobs():
        tuner.add(knob)
    used: list[Settings] = [dict(tuner.settings)]
    for _ in range(PERIODS):
        period = simulate(pipeline, tuner.settings)
        if noise is not None:
            period = replace(period, elapsed_s=period.elapsed_s * noise.uniform(0.97, 1.05))
        tuner.step(period)
        used.append(dict(tuner.settings))
    return used[-1], used


def best_s(pipeline: Pipeline) -> float:
    return min(simulate(pipeline, settings).elapsed_s for settings in all_settings(pipeline))


@pytest.mark.parametrize("seed", range(30))
def test_it_comes_near_the_best_fixed_settings_and_keeps_the_limits(seed: int) -> None:
    pipeline = random_pipeline(seed)
    settled, used = tune(pipeline)
    assert max(workers_of(settings) for settings in used) <= pipeline.limits.workers
    assert max(buffered(pipeline, settings) for settings in used) <= pipeline.limits.ram_bytes
    assert simulate(pipeline, settled).elapsed_s <= 1.2 * best_s(pipeline)
