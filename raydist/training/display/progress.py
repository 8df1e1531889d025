"""Progress, rate and remaining time of an iteration over a dataset: arithmetic and texts of the progress bar.

Pure: output is in `views.py`, and times are arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch

__all__ = ["ProgressMeter", "Report", "duration"]

RATE_WINDOW_S = 10.0
"""Seconds over which the rate is measured, so that the remaining time follows changes of speed."""


@final
@dataclass(frozen=True, slots=True)
class Report:
    """One state of the progress display.

    Attributes:
        label: "Epoch 1/3", "Evaluate", ...
        step: Batches done.
        total: Total number of batches; None if unknown.
        rate: Examples per second; None before the first measurement.
        elapsed_s: Seconds since the start.
        left_s: Estimated remaining seconds; None if the total is unknown.
        logs: Loss and metrics.
        done: True at the end of the iteration.
    """

    label: str
    step: int
    total: int | None
    rate: float | None
    elapsed_s: float
    left_s: float | None
    logs: Mapping[str, Any] = field(default_factory=dict)
    done: bool = False

    @property
    def steps(self) -> str:
        """Batches done, and the total if known.

        >>> Report("Epoch 1/3", 5, 20, None, 0.0, None).steps
        '5/20'
        """
        return f"{self.step}" if self.total is None else f"{self.step}/{self.total}"

    @property
    def details(self) -> str:
        """Rate, logs and time, separated by two blanks.

        >>> Report("Epoch 1/3", 5, 20, 1234.5, 10.0, 30.0, {"loss": 0.25}).details
        '1,234 examples/s  loss 0.2500  30.0 s left'
        """
        parts = [] if self.rate is None else [f"{_number(self.rate)} examples/s"]
        parts += [f"{name} {_value(value)}" for name, value in self.logs.items()]
        if self.done:
            parts.append(f"in {duration(self.elapsed_s)}")
        elif self.left_s is not None:
            parts.append(f"{duration(self.left_s)} left")
        return "  ".join(parts)

    @property
    def line(self) -> str:
        """The report in one line, for logs."""
        return f"{self.label}  {self.steps} steps  {self.details}".rstrip()


@final
class ProgressMeter:
    """A meter of one iteration over a dataset. The caller reports steps and rows as they are *completed*."""

    def __init__(self, label: str, total: int | None, now: float) -> None:
        self.label = label
        self.total = total
        self._start = now
        self._points: deque[tuple[float, int, int]] = deque([(now, 0, 0)])  # (time, steps, rows), the oldest first

    def report(self, now: float, step: int, rows: int, logs: Mapping[str, Any]) -> Report:
        """Return the state at time `now` in seconds, when `step` batches with `rows` rows are done."""
        self._points.append((now, step, rows))
        while len(self._points) > 2 and self._points[1][0] <= now - RATE_WINDOW_S:
            self._points.popleft()
        since, old_step, old_rows = self._points[0]
        passed = now - since
        rate = (rows - old_rows) / passed if passed > 0 else None
        return Report(self.label, step, self.total, rate, now - self._start, self._left(step, old_step, passed), logs)

    def finished(self, now: float, step: int, rows: int) -> Report:
        """Return the last report, with the rate of the whole iteration."""
        elapsed = now - self._start
        rate = rows / elapsed if elapsed > 0 else None
        return Report(self.label, step, step, rate, elapsed, None, done=True)

    def _left(self, step: int, old_step: int, passed: float) -> float | None:
        if self.total is None or step == old_step:
            return None
        return max(0, self.total - step) * passed / (step - old_step)


def duration(seconds: float) -> str:
    """Format seconds; from a minute on as hours, minutes and seconds.

    >>> duration(4.25), duration(3725.4)
    ('4.2 s', '1:02:05')
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _number(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2f}"


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"<{'x'.join(map(str, value.shape))} values>"
    if isinstance(value, float):
        return f"{value:.4f}" if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{value:.4g}"
    return str(value)
