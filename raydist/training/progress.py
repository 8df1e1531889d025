"""Progress of an iteration over a dataset: rate and remaining time, and their display."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TextIO, final

import torch
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

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


class View(ABC):
    """A display of progress reports.

    Attributes:
        interval_s: Seconds between two reports; each report blocks for dispatched steps.
    """

    interval_s: float

    @abstractmethod
    def show(self, report: Report) -> None:
        """Show a report. After a report that is `done`, the next one starts a new line."""

    @abstractmethod
    def close(self) -> None:
        """Complete the output, also after an error. May be called twice."""


@final
class SilentView(View):
    """A view without output."""

    interval_s = float("inf")

    def show(self, report: Report) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@final
class LogView(View):
    """Plain lines: one every 10 seconds, and one at the end of each iteration."""

    interval_s = 10.0

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, report: Report) -> None:
        print(report.line, file=self._stream, flush=True)

    def close(self) -> None:
        """Do nothing: every line is complete."""


@final
class TerminalView(View):
    """A bar that is redrawn in place, in the caller's thread only. The program's own output appears above the bar."""

    interval_s = 0.5

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None

    def show(self, report: Report) -> None:
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(_render(report), refresh=True)
        if report.done:
            self.close()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _render(report: Report) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    bar = Text("") if report.total is None else ProgressBar(total=report.total, completed=report.step, width=24)
    row.add_row(report.label, bar, report.steps, report.details)
    return row


@final
class NotebookView(View):
    """One line of a notebook cell's output that is replaced."""

    interval_s = 1.0

    def __init__(self, display: Any) -> None:
        self._display = display  # IPython.display.display
        self._handle: Any = None

    def show(self, report: Report) -> None:
        content = {"text/plain": report.line}
        if self._handle is None:
            self._handle = self._display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)
        if report.done:
            self._handle = None

    def close(self) -> None:
        self._handle = None


def make_view(stream: TextIO | None = None) -> View:
    """Return the view of a stream, `sys.stdout` by default, for the environment that the program runs in."""
    out = sys.stdout if stream is None else stream
    display = _notebook_display()
    if display is not None:
        return NotebookView(display)
    if out.isatty() and os.environ.get("TERM") != "dumb":
        return TerminalView(Console(file=out))
    return LogView(out)


def _notebook_display() -> Any:
    # A notebook has imported IPython already; other programs must not pay for the import.
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if type(shell).__name__ != "ZMQInteractiveShell":
        return None
    from IPython.display import display

    return display


@contextlib.contextmanager
def open_view(verbose: bool, stream: TextIO | None = None) -> Iterator[View]:
    """Open the view for this environment, or a silent one; close it at the end of the `with` block."""
    with contextlib.closing(make_view(stream) if verbose else SilentView()) as view:
        yield view


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
