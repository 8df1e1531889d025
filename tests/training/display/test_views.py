from __future__ import annotations

import io
import re
import sys
import types
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from raydist.training.display.progress import Report
from raydist.training.display.views import LogView, NotebookView, SilentView, TerminalView, make_view
from tests.training.toys import compiled, regression, small_net

REPORT = Report("Epoch 1/3", 5, 20, 1234.0, 2.0, 6.0, {"loss": 0.25})
LAST = replace(REPORT, step=20, left_s=None, done=True)


def test_a_log_gets_whole_lines() -> None:
    stream = io.StringIO()
    view = make_view(stream)
    view.show(REPORT)
    view.show(LAST)
    view.close()
    assert isinstance(view, LogView)
    assert stream.getvalue().splitlines() == [
        "Epoch 1/3  5/20 steps  1,234 examples/s  loss 0.2500  6.0 s left",
        "Epoch 1/3  20/20 steps  1,234 examples/s  loss 0.2500  in 2.0 s",
    ]


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


def test_a_terminal_is_in_order_again_after_an_error() -> None:
    view, stream = terminal()
    view.show(REPORT)
    view.close()
    view.close()
    assert stream.getvalue().endswith("\x1b[?25h")


def test_a_pass_of_unknown_length_has_no_bar() -> None:
    view, stream = terminal()
    view.show(replace(REPORT, total=None, left_s=None))
    view.close()
    assert "\u2501" not in stream.getvalue()
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


def test_a_notebook_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    class ZMQInteractiveShell:
        pass

    def display(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("not called")

    ipython = types.SimpleNamespace(get_ipython=ZMQInteractiveShell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    assert isinstance(make_view(io.StringIO()), NotebookView)
    ipython.get_ipython = lambda: None  # IPython is imported, but this is no notebook
    assert isinstance(make_view(io.StringIO()), LogView)


def test_silence(capsys: pytest.CaptureFixture[str]) -> None:
    view = SilentView()
    view.show(REPORT)
    view.close()
    assert capsys.readouterr().out == ""


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
