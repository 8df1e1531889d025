from __future__ import annotations

from typing import Any, final

import pytest

from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.autotune.ahead_judge import AheadJudge
from raydist.pipelines.autotune.eager_prefetch import EagerPrefetch
from raydist.pipelines.engine.budget import Budgets
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.engine.read_ahead import OptionalReadAhead
from raydist.pipelines.metering.iteration_meters import IterationMeters
from raydist.pipelines.run.plan import open_iterator


@final
class Clock:
    """Seconds and CPU seconds that only a test lets pass."""

    def __init__(self) -> None:
        self.now = self.used = 0.0
        self.reads = 0
        self.watched: list[float] = []
        self.shown: list[bool] = []
        self.judge = AheadJudge()

    def part(self) -> EagerPrefetch:
        return EagerPrefetch(
            self.judge,
            IterationMeters().meter("prefetch-1"),
            Budgets(),
            name="prefetch-1",
            watch=self.watched.append,
            show=self.shown.append,
            clock=self.read,
            cpu_clock=lambda: self.used,
        )

    def read(self) -> float:
        self.reads += 1
        return self.now

    def block(self, part: EagerPrefetch, *, made_s: float, busy_s: float, computes: float) -> None:
        """The consumer works, then asks for a block, which is made."""
        self.now += busy_s
        part.look()
        self.now += made_s
        part.made(made_s)
        self.used += computes * (made_s + busy_s)
        part.handed_out(10, 80)


def test_a_consumer_that_waits_is_told_from_one_that_computes() -> None:
    for computes, expected in ((0.2, True), (1.0, False)):
        clock = Clock()
        part = clock.part()
        for _ in range(5):
            clock.block(part, made_s=0.002, busy_s=0.002, computes=computes)
        assert part.is_on is expected
        assert clock.shown == [True] * expected


def test_the_time_between_blocks_is_the_consumers() -> None:
    clock = Clock()
    part = clock.part()
    for _ in range(5):
        clock.block(part, made_s=0.004, busy_s=0.0, computes=0.0)
    assert clock.shown == []


def test_quick_blocks_are_told_of_together_and_cost_no_look_at_the_clock() -> None:
    clock = Clock()
    part = clock.part()
    for _ in range(45):
        clock.block(part, made_s=0.00005, busy_s=0.0, computes=1.0)
    assert clock.reads <= 10


@pytest.mark.parametrize("slow_s", [0.0, 0.002])
def test_blocks_that_take_less_than_a_thread_costs_get_none(slow_s: float) -> None:
    """Whatever their consumer waits for, and although one of 16 takes longer than that."""
    clock = Clock()
    part = clock.part()
    for number in range(2000):
        clock.block(part, made_s=0.00005 + slow_s * (number % 16 == 0), busy_s=0.0005, computes=0.0)
    assert clock.shown == []


def test_quick_blocks_that_become_slow_get_a_thread_soon() -> None:
    clock = Clock()
    part = clock.part()
    for _ in range(500):
        clock.block(part, made_s=0.00005, busy_s=0.001, computes=0.0)
    for _ in range(20):
        clock.block(part, made_s=0.002, busy_s=0.002, computes=0.0)
    assert True in clock.shown


def test_a_thread_tells_how_long_blocks_took() -> None:
    clock = Clock()
    part = clock.part()
    for _ in range(3):
        clock.block(part, made_s=0.002, busy_s=0.002, computes=0.0)
    op = Dataset.range(40)._op
    source = open_iterator(op, seed=0, epoch=0, options=Options(), executor=InlineExecutor())
    iterator = OptionalReadAhead(source, part)
    got: list[Any] = []
    while len(got) < 40:
        got += iterator.next_block(7).columns[0].tolist()
    iterator.close()
    assert got == list(range(40))
    assert clock.watched
