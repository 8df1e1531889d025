"""`dataset.profile()`: run a pipeline for a while and report statistics."""

from __future__ import annotations

import contextlib
import itertools
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, final

from raydist.core.errors import InvalidArgumentError
from raydist.pipelines.metering.events import EventRing, chrome_trace
from raydist.pipelines.metering.iteration_meters import IterationMeters
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


_ARROW = '<div class="arrow">↓</div>'


def draw(stats: PipelineStats) -> str:
    """Return the graph: a box for each stage below the boxes of its inputs, and the consumer at the end."""
    read = {name for stage in stats.stages for name in stage.inputs}
    stages = {stage.name: stage for stage in stats.stages}
    ends = [stage.name for stage in stats.stages if stage.name not in read]
    above = [*_inputs(ends, stages, stats.bottleneck, set()), _ARROW] if ends else []
    lines = [f"waited {percent(stats.consumer_waited)} of the time"]
    if stats.bottleneck == HANDING_OVER:
        lines.append("handing elements over takes longest")
    marked = stats.bottleneck in (CONSUMER, HANDING_OVER)
    return _column([*above, _box(CONSUMER, lines, 1.0 - stats.consumer_waited, marked=marked)])


def _inputs(names: Sequence[str], stages: Mapping[str, StageStats], marked: str, drawn: set[str]) -> list[str]:
    """Return the boxes of stages and of all above them: side by side, or in the reader's column if there is one."""
    if len(names) > 1:
        columns = [_column(_inputs([name], stages, marked, drawn)) for name in names]
        return [f'<div class="inputs">{"".join(columns)}</div>']
    (name,) = names
    stage = stages.get(name)
    if stage is None or name in drawn:  # a dataset that two branches read is drawn in the first one
        return [f'<p class="soft">{escape(name)}</p>']
    drawn.add(name)
    above = [*_inputs(stage.inputs, stages, marked, drawn), _ARROW] if stage.inputs else []
    return [*above, _stage_box(stage, marked=name == marked)]


def _stage_box(stage: StageStats, *, marked: bool) -> str:
    is_queue = stage.kind == "prefetch"
    filled = (stage.queue_fill or 0.0) if is_queue else stage.busy
    share = f"{percent(filled)} {'full' if is_queue else 'busy'}"
    lines = [stage.label, f"{quantity(stage.elements_per_s)}/s · {stage.where} · {share}"]
    return _box(stage.name, lines, filled, marked=marked)


def _box(title: str, lines: Sequence[str], filled: float, *, marked: bool) -> str:
    tag = '<span class="tag">▲ bottleneck</span>' if marked else ""
    texts = "".join(f'<p title="{escape(line)}">{escape(line)}</p>' for line in lines)
    bar = f'<span class="meter"><i style="width:{filled:.0%}"></i></span>'
    return f'<div class="box{" marked" if marked else ""}"><p class="title">{tag}{escape(title)}</p>{texts}{bar}</div>'


def _column(parts: Sequence[str]) -> str:
    return f'<div class="column">{"".join(parts)}</div>'


_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --ink: #1d2430; --soft: #5b6675; --line: #d5dae1;
  --bar: #3b74c9; --hot: #c4451c; --warm: #fdeee8; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171c; --card: #1d2229; --ink: #e6e9ee; --soft: #9aa5b4; --line: #465061; --bar: #6ea2ee;
    --hot: #ff8a5c; --warm: #37231b; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 16px; margin: 0 0 12px; }
p { margin: 0 0 8px; } .soft { color: var(--soft); }
section { margin-top: 16px; padding: 16px; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; }
.limit { border-color: var(--hot); background: var(--warm); } .limit p { margin: 0; }
.limit strong, tr.marked th { color: var(--hot); }
.wide { overflow-x: auto; }
.column { display: flex; flex-direction: column; align-items: center; }
.inputs { display: flex; gap: 24px; align-items: end; }
.arrow { color: var(--soft); line-height: 1.4; }
.box { width: 280px; padding: 10px 14px; border: 1px solid var(--line); border-radius: 8px; }
.box.marked { border: 2px solid var(--hot); background: var(--warm); } .box .tag { float: right; color: var(--hot); }
.box p { margin: 0; font-size: 13px; color: var(--soft); }
.box p { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.box .title { font-weight: 600; color: var(--ink); } .box .meter { display: block; width: 100%; margin-top: 6px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { padding: 6px 10px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
thead th { color: var(--soft); font-weight: 500; } tbody th { font-weight: 600; }
tbody tr:last-child > * { border-bottom: 0; }
.word { text-align: left; } .label { display: block; color: var(--soft); font-weight: 400; font-size: 12.5px; }
.meter { display: inline-block; width: 56px; height: 6px; margin-right: 8px; border-radius: 3px;
  background: var(--line); vertical-align: middle; overflow: hidden; }
.meter i { display: block; height: 100%; background: var(--bar); } .marked .meter i { background: var(--hot); }
.share { display: inline-block; min-width: 42px; }
.wide + p { margin-top: 12px; }
ul { margin: 0; padding-left: 20px; }
@media (max-width: 600px) { main { padding: 16px 8px 32px; } section { padding: 12px; } }
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
    """Return the whole HTML text.

    Args:
        stats: Statistics to show.
        title: Heading; plain text, as are the notes.
        notes: Sentences below the heading.
    """
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
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
    return f'<span class="meter"><i style="width:{share:.0%}"></i></span><span class="share">{percent(share)}</span>'


def _decisions(decisions: Sequence[str]) -> str:
    if not decisions:
        return '<p class="soft">Nothing was changed while it ran.</p>'
    return "<ul>" + "".join(f"<li>{escape(decision)}</li>" for decision in decisions) + "</ul>"
