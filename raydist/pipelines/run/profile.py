"""`dataset.profile()`: run a pipeline for a while and report statistics."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, final

from raydist.core.errors import InvalidArgumentError
from raydist.pipelines.metering.iteration_meters import IterationMeters
from raydist.pipelines.metering.meter import Event, EventLog
from raydist.pipelines.metering.stats import (
    CONSUMER,
    HANDING_OVER,
    PipelineStats,
    StageStats,
    percent,
    quantity,
    stats_of,
)
from raydist.pipelines.run.iterator import DatasetIterator

_SLOW_START_S = 0.5  # shorter starts are not reported
_PAGE, _TRACE = "profile.html", ".trace.json"
_MOST_EVENTS = 100_000  # about 15 MB of JSON


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
    """Iterate for `seconds` after the first element, over as many epochs as needed; write page and trace."""
    if not (isinstance(seconds, int | float) and 0 < seconds < math.inf):
        raise InvalidArgumentError(f"profile needs a finite number of seconds > 0, got {seconds!r}.")
    page = _page_path(path)
    events = EventLog(maxlen=_MOST_EVENTS)
    stats, epochs, started_s = _iterate(open_epoch, IterationMeters(events=events), seconds)
    trace = page.with_suffix(_TRACE)
    page.write_text(render_page(stats, title=title, notes=_notes(stats, epochs, started_s)), encoding="utf-8")
    trace.write_text(chrome_trace(tuple(events)), encoding="utf-8")
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


def chrome_trace(events: Iterable[Event]) -> str:
    """Return JSON for ui.perfetto.dev and chrome://tracing: a row per thread or worker, a bar per block.

    Source: Trace Event Format (Google), complete events ("X") and names of threads ("M").
    """
    ordered = sorted(events, key=lambda event: (event.begun_at, -event.seconds))
    rows = {worker: row for row, worker in enumerate(dict.fromkeys(event.worker for event in ordered))}
    names = [_name("process_name", 0, "raydist"), *(_name("thread_name", row, name) for name, row in rows.items())]
    zero = ordered[0].begun_at if ordered else 0.0
    bars = [_bar(event, rows[event.worker], zero) for event in ordered]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": [*names, *bars]})


def _name(kind: str, row: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": 0, "tid": row, "args": {"name": name}}


def _bar(event: Event, row: int, zero: float) -> dict[str, object]:
    return {
        "ph": "X",
        "name": event.stage,
        "cat": "block",
        "pid": 0,
        "tid": row,
        "ts": round(1e6 * (event.begun_at - zero), 1),  # microseconds
        "dur": round(1e6 * event.seconds, 1),
        "args": {"elements": event.elements},
    }


def draw(stats: PipelineStats) -> str:
    """Return the graph as nested lists: the consumer, the stages that it reads, their inputs, and so on."""
    stages = {stage.name: stage for stage in stats.stages}
    read = {name for stage in stats.stages for name in stage.inputs}
    drawn: set[str] = set()

    def nodes(names: Iterable[str]) -> str:
        return f"<ul>{''.join(map(node, names))}</ul>"

    def node(name: str) -> str:
        stage = stages.get(name)
        if stage is None or name in drawn:  # a dataset that two branches read is drawn in the first one
            return f'<li class="soft">{escape(name)}</li>'
        drawn.add(name)
        return _node(name, _work(stage), nodes(stage.inputs) if stage.inputs else "", marked=name == stats.bottleneck)

    waited = f"waited {percent(stats.consumer_waited)} of the time"
    if stats.bottleneck == HANDING_OVER:
        waited += ": handing elements over takes longest"
    ends = nodes([name for name in stages if name not in read]) if stages else ""
    return f"<ul>{_node(CONSUMER, waited, ends, marked=stats.bottleneck in (CONSUMER, HANDING_OVER))}</ul>"


def _work(stage: StageStats) -> str:
    is_queue = stage.kind == "prefetch"
    share = f"{percent((stage.queue_fill or 0.0) if is_queue else stage.busy)} {'full' if is_queue else 'busy'}"
    return f"{stage.label} · {quantity(stage.elements_per_s)}/s · {stage.where} · {share}"


def _node(name: str, text: str, inputs: str, *, marked: bool) -> str:
    title = f'<strong class="marked">▲ {escape(name)}</strong>' if marked else f"<strong>{escape(name)}</strong>"
    return f'<li>{title} <span class="soft">{escape(text)}</span>{inputs}</li>'


_STYLE = """
:root { color-scheme: light dark; }
body { max-width: 1080px; margin: 24px auto; padding: 0 16px; font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 22px; } h2 { font-size: 16px; margin-top: 24px; }
.soft { color: GrayText; } .label { display: block; color: GrayText; font-size: 12px; }
.marked, .limit strong { color: orangered; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { padding: 6px 10px; text-align: right; white-space: nowrap; border-bottom: 1px solid GrayText; }
.word { text-align: left; }
meter { width: 56px; margin-right: 8px; }
"""

_COLUMNS = (
    ("stage", "word"),
    ("where", "word"),
    ("elements/s", ""),
    ("MB/s", ""),
    ("busy", ""),
    ("CPU", ""),
    ("queue", ""),
    ("errors", ""),
    ("waits for", "word"),
)

_LEGEND = (
    "Busy: share of its workers' time that a stage worked. CPU: share of that work for which a CPU was used; the rest "
    "is waiting for a disk, a network or other threads. Queue: how full it was on average when it was asked."
)


def render_page(stats: PipelineStats, *, title: str, notes: Sequence[str] = ()) -> str:
    """Return the whole HTML text."""
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
            f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>",
            f"<h1>{escape(title)}</h1>",
            *(f'<p class="soft">{escape(note)}</p>' for note in (stats.headline, *notes)),
            *(_limit(stats) if stats.bottleneck else ()),
            _section("Graph", f'<div class="wide">{draw(stats)}</div>'),
            _section("Stages", f'<div class="wide">{_table(stats)}</div><p class="soft">{_LEGEND}</p>'),
            _section("Autotune", _decisions(stats.decisions)),
            "</main>\n</body>\n</html>\n",
        ]
    )


def _section(heading: str, content: str) -> str:
    return f"<section>\n<h2>{heading}</h2>\n{content}\n</section>"


def _limit(stats: PipelineStats) -> list[str]:
    sentence = f"<strong>{escape(stats.bottleneck)}</strong> ({escape(stats.because)})."
    return [f'<section class="limit"><p>▲ Bottleneck: {sentence}</p></section>']


def _table(stats: PipelineStats) -> str:
    heads = "".join(f'<th scope="col" class="{kind}">{name}</th>' for name, kind in _COLUMNS)
    rows = "\n".join(_row(stage, marked=stage.name == stats.bottleneck) for stage in stats.stages)
    return f"<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"


def _row(stage: StageStats, *, marked: bool) -> str:
    name = f'{escape(stage.name)}<span class="label">{escape(stage.label)}</span>'
    cells = [
        f'<th scope="row" class="word">{name}</th>',
        f'<td class="word">{stage.where}</td>',
        f"<td>{quantity(stage.elements_per_s)}</td>",
        f"<td>{stage.bytes_per_s / 1e6:,.1f}</td>",
        f"<td>{_meter(stage.busy)}</td>",
        f"<td>{'' if stage.cpu is None else percent(stage.cpu)}</td>",
        f"<td>{'' if stage.queue_fill is None else _meter(stage.queue_fill)}</td>",
        f"<td>{stage.errors or ''}</td>",
        f'<td class="word">{escape(stage.waits)}</td>',
    ]
    return "".join(['<tr class="marked">' if marked else "<tr>", *cells, "</tr>"])


def _meter(share: float) -> str:
    return f'<meter value="{share:.2f}"></meter>{percent(share)}'


def _decisions(decisions: Sequence[str]) -> str:
    if not decisions:
        return '<p class="soft">Nothing was changed while it ran.</p>'
    return "<ul>" + "".join(f"<li>{escape(decision)}</li>" for decision in decisions) + "</ul>"
