from __future__ import annotations

import pytest

from raydist.pipelines.autotune.model import INLINE, Load, StageSetting, Workload, predict_s, workers_of

WORK = Workload("map", 8.0, serial=0.0, moving_s=1.0)


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({}, 11.0),  # everything one after the other
        ({"map": StageSetting("threads", 1)}, 8.0),
        ({"map": StageSetting("threads", 4)}, 3.0),  # what is left is the rest and the consumer
        ({"map": StageSetting("actors", 3)}, 4.0),  # the rest, the consumer, and moving
        ({"map": StageSetting("actors", 1)}, 9.0),
        ({"prefetch": StageSetting("threads", 1)}, 10.0),
        ({"map": StageSetting("threads", 8), "prefetch": StageSetting("threads", 1)}, 2.0),
    ],
)
def test_what_goes_on_side_by_side_takes_as_long_as_its_slowest(
    settings: dict[str, StageSetting], seconds: float
) -> None:
    load = Load([WORK], rest_s=2.0, consumer_s=1.0, split="prefetch")
    assert predict_s(load, settings) == pytest.approx(seconds)


def test_threads_share_the_gil_and_actors_do_not() -> None:
    load = Load([Workload("map", 8.0, serial=0.75)], rest_s=0.0, consumer_s=0.0)
    assert predict_s(load, {"map": StageSetting("threads", 8)}) == pytest.approx(6.0)
    assert predict_s(load, {"map": StageSetting("actors", 8)}) == pytest.approx(1.0)


def test_settings_read_well_and_count_their_workers() -> None:
    settings = {"map": StageSetting("threads", 3), "filter": INLINE, "prefetch": StageSetting("threads", 1)}
    assert [str(setting) for setting in settings.values()] == ["3 threads", "inline", "1 thread"]
    assert workers_of(settings) == 4
