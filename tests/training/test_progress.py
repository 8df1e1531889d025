"""Progress: rates and remaining time, reports, views."""

from __future__ import annotations

import io
import re
import sys
import types
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

from raydist.training.progress import (
    LogView,
    NotebookView,
    ProgressMeter,
    Report,
    Reporter,
    TerminalView,
    View,
    make_view,
)
from tests.training.toys import compiled, regression, small_net


def test_rate_and_time_left_follow_the_last_seconds() -> None:
    meter = ProgressMeter("Epoch 1/1", 100, now=0.0)
    slow = meter.report(10.0, 10, 1000, {})
    assert (slow.rate, slow.left_s) == (100.0, 90.0)
    fast = meter.report(20.0, 60, 6000, {})
    assert (fast.rate, fast.left_s) == (500.0, 8.0)
    meter = ProgressMeter("Epoch 1/1", None, now=5.0)
    meter.report(10.0, 1, 10, {})
    last = meter.finished(25.0, 4, 400)  # has the rate of the whole pass
    assert (last.rate, last.elapsed_s, last.left_s, last.total, last.done) == (20.0, 20.0, None, 4, True)
    assert ProgressMeter("", None, 0.0).report(1.0, 5, 50, {}).left_s is None
    assert ProgressMeter("", 10, 0.0).report(1.0, 0, 0, {}).left_s is None
    assert ProgressMeter("", 10, 0.0).report(0.0, 1, 1, {}).rate is None


def test_a_line_says_all() -> None:
    logs = {"loss": 0.12345, "accuracy": 0.5, "tiny": 1e-7, "per_class": torch.ones(3), "name": "a"}
    report = Report("Epoch 2/3", 5, 20, 4321.0, 10.0, 125.0, logs)
    assert report.line == (
        "Epoch 2/3  5/20 steps  4,321 examples/s  loss 0.1235  accuracy 0.5000  tiny 1e-07  "
        "per_class <3 values>  name a  0:02:05 left"
    )
    assert Report("Evaluate", 4, 4, 2.5, 1.5, None, {"loss": 0.0}, done=True).line == (
        "Evaluate  4/4 steps  2.50 examples/s  loss 0.0000  in 1.5 s"
    )
    assert Report("Predict", 4, None, None, 1.5, None).line == "Predict  4 steps"


class Page(View):
    """Keeps what it is shown."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.reports: list[Report] = []

    def show(self, report: Report) -> None:
        self.reports.append(report)

    def close(self) -> None:
        """Nothing is open."""


def shown(*, steps: int, step_s: float, read_s: float) -> tuple[Page, int]:
    """Reports of a pass whose steps and reads take these times, and how often was read."""
    page, now, reads = Page(1.0), 0.0, 0
    reporter = Reporter(page, lambda: now)

    def read() -> tuple[int, Mapping[str, Any]]:
        nonlocal now, reads
        reads += 1
        now += read_s
        return 10 * step, {"loss": 1.0}

    reporter.start("Epoch 1/1", steps)
    for step in range(1, steps + 1):
        now += step_s
        reporter.step(step, read)
    return page, reads


def test_logs_are_read_once_per_interval_and_in_a_tenth_of_the_time_at_most() -> None:
    page, reads = shown(steps=1000, step_s=0.0625, read_s=0.0)
    assert reads == len(page.reports) == 62
    assert page.reports[0].step == 16
    page, reads = shown(steps=1000, step_s=0.125, read_s=1.0)
    assert 12 <= reads <= 13
    assert page.reports[-1].elapsed_s >= 10 * (reads - 1)


def test_the_result_is_shown_with_the_rate_of_the_pass_alone() -> None:
    page, times = Page(1.0), iter([0.0, 0.0, 2.0, 100.0])  # after validation, say
    reporter = Reporter(page, lambda: next(times))
    reporter.start("Epoch 1/1", 4)
    reporter.stop(4, 40)
    reporter.result({"loss": 0.5})
    assert page.reports == [Report("Epoch 1/1", 4, 4, 20.0, 2.0, None, {"loss": 0.5}, done=True)]


REPORT = Report("Epoch 1/3", 5, 20, 1234.0, 2.0, 6.0, {"loss": 0.25})
LAST = replace(REPORT, step=20, left_s=None, done=True)


def terminal() -> tuple[TerminalView, io.StringIO]:
    stream = io.StringIO()
    return TerminalView(Console(file=stream, force_terminal=True, width=120, legacy_windows=False)), stream


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_terminal_gets_a_bar_that_is_redrawn() -> None:
    view, stream = terminal()
    view.show(REPORT)
    view.show(replace(REPORT, step=10))
    view.show(LAST)
    text = stream.getvalue()
    assert "\x1b[2K" in text  # the line is erased and written again
    assert "\u2501" in text
    for part in ("Epoch 1/3", "5/20", "10/20", "1,234 examples/s", "loss 0.2500", "6.0 s left", "in 2.0 s"):
        assert part in plain(text)
    assert text.endswith("\x1b[?25h")  # the cursor is visible again
    view, stream = terminal()
    view.show(replace(REPORT, total=None, left_s=None))
    view.close()
    assert "\u2501" not in stream.getvalue(), "there is no bar where the length is not known"
    assert "5 1,234 examples/s" in plain(stream.getvalue())


def test_a_notebook_gets_one_line_per_pass_that_changes() -> None:
    updates: list[tuple[int, str]] = []

    class Handle:
        def __init__(self, number: int) -> None:
            self.number = number

        def update(self, content: dict[str, str], *, raw: bool) -> None:
            updates.append((self.number, content["text/plain"]))

    def display(content: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        number = len({n for n, _ in updates})
        updates.append((number, content["text/plain"]))
        return Handle(number)

    view = NotebookView(display)
    for report in (REPORT, LAST, REPORT):
        view.show(report)
    view.close()
    assert [number for number, _ in updates] == [0, 0, 1]
    assert updates[1][1].endswith("in 2.0 s")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_view_fits_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(make_view(Terminal()), TerminalView)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_view(Terminal()), LogView)
    shell = type("ZMQInteractiveShell", (), {})
    ipython = types.SimpleNamespace(get_ipython=shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=print))
    assert isinstance(make_view(io.StringIO()), NotebookView)
    ipython.get_ipython = lambda: None  # IPython is imported, but this is no notebook
    assert isinstance(make_view(io.StringIO()), LogView)


def test_fit_in_a_log_prints_one_line_per_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    model = compiled(small_net())
    model.fit(regression(10, 4), epochs=2, validation_data=regression(4, 4))
    model.evaluate(regression(4, 4))
    model.predict(regression(4, 4))
    model.fit(regression(4, 4), verbose=False)
    lines = capsys.readouterr().out.splitlines()
    rate = r"[\d,.]+ examples/s"
    patterns = [
        *(rf"Epoch {i}/2  3/3 steps  {rate}  loss \S+  val_loss \S+  in \d+\.\d s" for i in (1, 2)),
        rf"Evaluate  1/1 steps  {rate}  loss \S+  in \d+\.\d s",
        rf"Predict  1/1 steps  {rate}  in \d+\.\d s",
    ]
    assert len(lines) == len(patterns)
    assert all(re.fullmatch(pattern, line) for pattern, line in zip(patterns, lines, strict=True))
