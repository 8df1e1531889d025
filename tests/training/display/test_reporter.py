from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raydist.training.display.progress import Report
from raydist.training.display.reporter import Reporter
from raydist.training.display.views import View


class Page(View):
    """Keeps what it is shown."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.reports: list[Report] = []

    def show(self, report: Report) -> None:
        self.reports.append(report)

    def close(self) -> None:
        """Nothing is open."""


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def shown(*, steps: int, step_s: float, read_s: float, interval_s: float = 1.0) -> tuple[Page, int]:
    """Reports of a pass whose steps and reads take these times, and how often was read."""
    page, clock, reads = Page(interval_s), Clock(), 0
    reporter = Reporter(page, clock)

    def read() -> tuple[int, Mapping[str, Any]]:
        nonlocal reads
        reads += 1
        clock.now += read_s
        return 10 * step, {"loss": 1.0}

    reporter.start("Epoch 1/1", steps)
    for step in range(1, steps + 1):
        clock.now += step_s
        reporter.step(step, read)
    return page, reads


def test_logs_are_read_once_per_interval_and_not_per_step() -> None:
    page, reads = shown(steps=1000, step_s=0.0625, read_s=0.0)
    assert reads == len(page.reports) == 62
    assert page.reports[0].step == 16


def test_slow_steps_are_shown_each() -> None:
    assert shown(steps=5, step_s=2.0, read_s=0.0)[1] == 5


def test_slow_logs_take_a_tenth_of_the_time_at_most() -> None:
    page, reads = shown(steps=1000, step_s=0.125, read_s=1.0)
    assert 12 <= reads <= 13
    assert page.reports[-1].elapsed_s >= 10 * (reads - 1)


def test_very_slow_logs_are_shown_once_a_minute() -> None:
    assert shown(steps=400, step_s=1.0, read_s=30.0)[1] >= 6


def test_the_result_is_shown_with_the_rate_of_the_pass_alone() -> None:
    page, clock = Page(1.0), Clock()
    reporter = Reporter(page, clock)
    reporter.start("Epoch 1/1", 4)
    clock.now = 2.0
    reporter.stop(4, 40)
    clock.now = 100.0  # validation, say
    reporter.result({"loss": 0.5})
    assert page.reports == [Report("Epoch 1/1", 4, 4, 20.0, 2.0, None, {"loss": 0.5}, done=True)]
