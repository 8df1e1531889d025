"""Progress reports that do not slow training down."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, final

from raydist.training.display.progress import ProgressMeter, Report
from raydist.training.display.views import View

__all__ = ["Reporter"]

MAX_SHARE = 0.1
"""Largest share of time for reading logs for display: some metrics are slow to compute."""

LONGEST_INTERVAL_S = 60.0


@final
class Reporter:
    """The reports of a fit, evaluate or predict to one view.

    Reading the loss blocks until the dispatched steps are done, so it happens once per interval and not once per step.
    """

    def __init__(self, view: View, clock: Callable[[], float] = time.monotonic) -> None:
        self._view = view
        self._clock = clock
        self._meter = ProgressMeter("", None, clock())
        self._interval_s = view.interval_s
        self._due = 0.0
        self._final: Report | None = None

    def start(self, label: str, total: int | None) -> None:
        """Begin an iteration of `total` batches."""
        now = self._clock()
        self._meter = ProgressMeter(label, total, now)
        self._interval_s = self._view.interval_s
        self._due = now + self._interval_s

    def step(self, step: int, read: Callable[[], tuple[int, Mapping[str, Any]]]) -> None:
        """Record that `step` batches are dispatched. If a report is due, call `read`, which returns rows and logs."""
        before = self._clock()
        if before < self._due:
            return
        rows, logs = read()
        now = self._clock()
        self._view.show(self._meter.report(now, step, rows, logs))
        self._interval_s = max(self._view.interval_s, min((now - before) / MAX_SHARE, LONGEST_INTERVAL_S))
        self._due = now + self._interval_s

    def stop(self, step: int, rows: int) -> None:
        """End the iteration; the time until `result` does not count for its rate."""
        self._final = self._meter.finished(self._clock(), step, rows)

    def result(self, logs: Mapping[str, Any]) -> None:
        """Show the result of the iteration that ended last."""
        if self._final is not None:
            self._view.show(replace(self._final, logs=logs))

    def close(self) -> None:
        """Close the view."""
        self._view.close()
