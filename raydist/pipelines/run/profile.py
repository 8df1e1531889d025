"""`dataset.profile()`: run a pipeline for a while and report statistics."""

from __future__ import annotations

import contextlib
import itertools
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from raydist.errors import InvalidArgumentError
from raydist.pipelines.metering.events import EventRing, chrome_trace
from raydist.pipelines.metering.iteration_meters import IterationMeters
from raydist.pipelines.metering.page import render_page
from raydist.pipelines.metering.stats import PipelineStats, stats_of
from raydist.pipelines.run.iterator import DatasetIterator

__all__ = ["Profile", "run_profile"]

_SLOW_START_S = 0.5  # shorter starts are not reported
_PAGE, _TRACE = "profile.html", ".trace.json"


@final
@dataclass(frozen=True, slots=True)
class Profile:
    """The statistics of a profiled pipeline. `str(profile)` is the printed report.

    Attributes:
        title: Heading of the page.
        started_s: Seconds until the first element (start of workers, first fill of buffers), which `stats` leaves out.
        stats: Rates, shares and the bottleneck.
        epochs: Number of epochs that began.
        html_path: HTML page with the graph and the table.
        trace_path: The last blocks of every thread and worker, for ui.perfetto.dev or chrome://tracing.

    >>> profile = rd.Dataset.range(100).batch(10).profile(seconds=0.05)  # doctest: +ELLIPSIS
    Profile of ...
    >>> profile.epochs >= 1 and profile.stats.elements > 0
    True
    """

    title: str
    started_s: float
    stats: PipelineStats
    epochs: int
    html_path: Path
    trace_path: Path

    def __str__(self) -> str:
        notes = [
            *_notes(self.stats, self.epochs, self.started_s),
            f"Page: {self.html_path}",
            f"Trace: {self.trace_path}",
        ]
        return "\n".join([self.title, str(self.stats), "", *notes])


def run_profile(
    open_epoch: Callable[[int, IterationMeters], DatasetIterator[Any]],
    *,
    title: str,
    seconds: float,
    path: str | Path | None,
) -> Profile:
    """Iterate for `seconds` after the first element, over as many epochs as needed; write page and trace.

    Args:
        open_epoch: Returns an iterator over epoch 0, 1, ... that uses the given meters.
        title: Heading of the page.
        seconds: Duration; > 0.
        path: Path of the page; the trace goes beside it. None for a new temporary directory.
    """
    if not (isinstance(seconds, int | float) and 0 < seconds < math.inf):
        raise InvalidArgumentError(f"profile needs a finite number of seconds > 0, got {seconds!r}.")
    page = _page_path(path)
    ring = EventRing()
    stats, epochs, started_s = _iterate(open_epoch, IterationMeters(ring=ring), seconds)
    trace = page.with_suffix(_TRACE)
    page.write_text(render_page(stats, title=title, notes=_notes(stats, epochs, started_s)), encoding="utf-8")
    trace.write_text(chrome_trace(ring.events()), encoding="utf-8")
    return Profile(title, started_s, stats, epochs, page, trace)


def _page_path(path: str | Path | None) -> Path:
    """Return the path of the page. Checks it before anything runs."""
    page = Path(tempfile.mkdtemp(prefix="raydist-profile-"), _PAGE) if path is None else Path(path)
    if page.suffix != ".html":
        raise InvalidArgumentError(f"path must name an .html file, got {str(path)!r}.")
    if not page.parent.is_dir():
        raise InvalidArgumentError(f"path must lie in a directory that exists, got {str(path)!r}.")
    return page


def _iterate(
    open_epoch: Callable[[int, IterationMeters], DatasetIterator[Any]], meters: IterationMeters, seconds: float
) -> tuple[PipelineStats, int, float]:
    """Return the statistics, the number of epochs that began, and the seconds until the first element."""
    begin = time.monotonic()
    iterator = open_epoch(0, meters)
    items = int(_advance(iterator, meters))
    meters.begin_again()
    started_s = time.monotonic() - begin
    end = time.monotonic() + seconds
    for epoch in itertools.count(1):
        with contextlib.closing(iterator):
            while time.monotonic() < end and _advance(iterator, meters):
                items += 1
            stats = stats_of(meters)  # before workers and queues are closed
        if not items or time.monotonic() >= end:
            break
        iterator, items = open_epoch(epoch, meters), 0
    return stats, epoch, started_s


def _advance(iterator: DatasetIterator[Any], meters: IterationMeters) -> bool:
    """Skip an element, or an error in its place; return False at the end of the epoch."""
    errors = _num_errors(meters)
    try:
        next(iterator)
    except StopIteration:
        return False
    except Exception:
        if _num_errors(meters) == errors:  # not the error of an element: the pipeline cannot be opened, for example
            iterator.close()
            raise
    return True


def _num_errors(meters: IterationMeters) -> int:
    return sum(reading.errors for reading in meters.readings())


def _notes(stats: PipelineStats, epochs: int, started_s: float) -> list[str]:
    if not stats.elements:
        return ["No element was handed out."]
    start = [f"The first element took {started_s:.1f} s, which are left out here."] if started_s > _SLOW_START_S else []
    again = [f"The dataset ended before the time was over: these are {epochs} epochs."] if epochs > 1 else []
    return start + again
