"""Views of progress: a bar in a terminal, a changing line in a notebook, plain lines in a log."""

from __future__ import annotations

import contextlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, TextIO, final

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from raydist.training.display.progress import Report

__all__ = ["LogView", "NotebookView", "SilentView", "TerminalView", "View", "make_view", "open_view"]


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
    """Return the view for the environment that the program runs in.

    Args:
        stream: Stream to write to, `sys.stdout` by default.
    """
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
