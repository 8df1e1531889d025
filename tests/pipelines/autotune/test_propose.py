from __future__ import annotations

from raydist.pipelines.autotune.model import INLINE, Knob, Limits, Load, Settings, StageSetting, Workload
from raydist.pipelines.autotune.propose import buffer_bytes, fits, propose

FREE = Workload("map", 8.0, serial=0.0, block_bytes=100)
THREADS = [Knob("map"), Knob("prefetch", splits=True)]


def proposed(work: Workload, limits: Limits, knobs: list[Knob] = THREADS, **most: int) -> Settings:
    return propose(Load([work], 0.5, 1.5, "prefetch"), knobs, limits, most)


def test_as_few_workers_as_the_consumer_needs() -> None:
    settings = proposed(FREE, Limits(16), prefetch=0)
    assert settings["map"] == StageSetting("threads", 4)  # the rest and the consumer take two seconds


def test_a_prefetch_leaves_the_consumer_its_own_time_only() -> None:
    settings = proposed(FREE, Limits(16))
    assert settings == {"map": StageSetting("threads", 6), "prefetch": StageSetting("threads", 1)}


def test_limits_hold() -> None:
    assert proposed(FREE, Limits(3), prefetch=0)["map"] == StageSetting("threads", 3)
    assert proposed(FREE, Limits(0)) == {"map": INLINE, "prefetch": INLINE}
    tight = proposed(FREE, Limits(16, ram_bytes=650), prefetch=0)
    assert tight["map"] == StageSetting("threads", 3)
    assert buffer_bytes([FREE], tight) == 600
    assert not fits(Load([FREE], 0, 0), {"map": StageSetting("threads", 4)}, Limits(16, ram_bytes=650))


def test_no_more_than_is_known_to_help() -> None:
    assert proposed(FREE, Limits(16), map=2, prefetch=0)["map"] == StageSetting("threads", 2)


def test_what_holds_the_gil_goes_to_actors_or_stays() -> None:
    held = Workload("map", 8.0, serial=1.0, moving_s=0.1)
    assert proposed(held, Limits(8), [Knob("map", ("inline", "threads", "actors"))])["map"].place == "actors"
    assert proposed(held, Limits(8), [Knob("map")])["map"].workers <= 1


def test_the_largest_stages_leave_first() -> None:
    works = [Workload("small", 1.0, serial=0.0), Workload("large", 6.0, serial=0.0)]
    settings = propose(Load(works, 0.0, 0.0), [Knob("small"), Knob("large")], Limits(3), {})
    assert settings == {"small": INLINE, "large": StageSetting("threads", 3)}


def test_a_stage_that_had_nothing_to_do_gets_no_fraction_of_a_worker() -> None:
    idle = Workload("read", 0.0, serial=0.5)
    load = Load([idle, Workload("map", 6.0, serial=0.0)], 2.0, 1.0)
    for places in (("inline", "threads"), ("inline", "threads", "actors"), ("inline", "actors")):
        settings = propose(load, [Knob("read", places), Knob("map", places)], Limits(3), {})
        assert all(setting == INLINE or setting.workers >= 1 for setting in settings.values())
