"""The judge of reading ahead, shown pipelines whose blocks take what a test says: no clock, no threads."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from raydist.pipelines.autotune.ahead_judge import AheadJudge, Lap

MS = 0.001
HANDING_OVER_S = 0.0001


@dataclass
class Simulation:
    """A maker and a consumer of blocks of ten elements.

    Attributes:
        made_s: Seconds that a block takes.
        busy_s: Seconds that the consumer takes for it.
        waits: Share of both that takes no CPU time.
        gain: Share of the shorter one that two threads save; negative if they hold each other up.
        threads: That make blocks, if any do.
    """

    made_s: float
    busy_s: float
    waits: float = 0.0
    gain: float = 1.0
    threads: int = 1
    now: float = 0.0
    switches: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.judge = AheadJudge(threads=self.threads)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            was_on = self.judge.is_on
            self.now += self._lap_s()
            if was_on:
                self.judge.made_ahead(self.made_s)
            both_s = self.made_s + self.busy_s
            lap = Lap(10, 0.0 if was_on else self.made_s, self.busy_s, 0.0 if was_on else self.waits * both_s)
            self.judge.handed_out(lap, self.now)
            if was_on is not self.judge.is_on:
                self.switches.append(self.now)

    def _lap_s(self) -> float:
        both_s = self.made_s + self.busy_s
        if not self.judge.is_on:
            return both_s
        saved_s = self.made_s * (1 - 1 / self.threads) if self.threads > 1 else min(self.made_s, self.busy_s)
        return both_s - self.gain * saved_s + HANDING_OVER_S

    @property
    def seconds_on(self) -> float:
        ends = [*self.switches, self.now]
        return sum(end - begin for begin, end in zip(ends[::2], ends[1::2], strict=False))


@pytest.mark.parametrize(
    ("made_s", "busy_s"), [(0.02 * MS, 0.1 * MS), (0.1 * MS, 5 * MS), (5 * MS, 0.0), (5 * MS, 0.1 * MS)]
)
def test_where_it_cannot_gain_no_thread_is_started(made_s: float, busy_s: float) -> None:
    pipeline = Simulation(made_s, busy_s, waits=1.0)
    pipeline.run(5.0)
    assert pipeline.switches == []


@pytest.mark.parametrize("seconds", [0.5 * MS, 5 * MS, 500 * MS])
def test_who_waits_is_read_ahead_for_at_once(seconds: float) -> None:
    pipeline = Simulation(seconds, seconds, waits=0.5)
    pipeline.run(100 * seconds)
    (begin,) = pipeline.switches
    assert begin <= 5 * 2 * seconds


def test_who_computes_is_read_ahead_for_after_a_trial() -> None:
    pipeline = Simulation(2 * MS, 3 * MS)
    pipeline.run(5.0)
    (begin,) = pipeline.switches
    assert 0.2 <= begin < 0.25
    assert pipeline.judge.is_on


@pytest.mark.parametrize("seconds", [0.5 * MS, 2 * MS])
@pytest.mark.parametrize(("waits", "gain"), [(0.0, 0.0), (0.0, -1.0), (1.0, -0.5)])
def test_a_thread_that_does_not_help_is_taken_back_soon_and_tried_ever_more_rarely(
    seconds: float, waits: float, gain: float
) -> None:
    pipeline = Simulation(seconds, seconds, waits, gain)
    pipeline.run(60.0)
    assert not pipeline.judge.is_on
    assert 2 < len(pipeline.switches) <= 2 * 9
    begins, ends = pipeline.switches[::2], pipeline.switches[1::2]
    assert all(end - begin < 0.05 for begin, end in zip(begins, ends, strict=True))
    assert pipeline.seconds_on < 0.01 * pipeline.now


@pytest.mark.parametrize("threads", [1, 4])
def test_one_slow_block_among_cheap_ones_changes_nothing(threads: int) -> None:
    pipeline = Simulation(0.02 * MS, 0.02 * MS, waits=1.0, threads=threads)
    for _ in range(50):
        pipeline.run(10 * MS)
        pipeline.made_s = pipeline.busy_s = 20 * MS  # the machine did something else
        pipeline.run(1 * MS)
        pipeline.made_s = pipeline.busy_s = 0.02 * MS
    assert pipeline.switches == []


def test_slow_blocks_among_cheap_ones_are_made_ahead() -> None:
    pipeline = Simulation(0.02 * MS, 2 * MS, waits=1.0)
    for _ in range(10):
        pipeline.run(15 * MS)
        pipeline.made_s = 10 * MS  # a file is read
        pipeline.run(1 * MS)
        pipeline.made_s = 0.02 * MS
    assert pipeline.judge.is_on


def test_a_thread_ends_when_its_consumer_works_no_more() -> None:
    pipeline = Simulation(2 * MS, 2 * MS, waits=0.5)
    pipeline.run(1.0)
    assert pipeline.judge.is_on
    pipeline.busy_s = 0.0
    pipeline.run(1.0)
    assert not pipeline.judge.is_on
    pipeline.busy_s = 2 * MS
    pipeline.run(1.0)
    assert pipeline.judge.is_on


def test_several_threads_help_a_consumer_that_only_waits() -> None:
    slow = Simulation(10 * MS, 0.0, waits=1.0, threads=4)
    slow.run(1.0)
    (begin,) = slow.switches
    assert begin <= 0.05
    computing = Simulation(2 * MS, 0.0, gain=0.6, threads=4)
    computing.run(1.0)
    assert computing.judge.is_on
    cheap = Simulation(0.05 * MS, 0.0, waits=1.0, threads=4)
    cheap.run(1.0)
    assert cheap.switches == []
