"""The HTML page of a profile: one self-contained file with a drawing of the pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import final

from raydist.pipelines.metering.bottleneck import CONSUMER, HANDING_OVER
from raydist.pipelines.metering.stats import PipelineStats, StageStats
from raydist.pipelines.metering.stats_table import percent, quantity

__all__ = ["draw", "drawn_stages", "lay_out", "render_page"]

_WIDTH, _HEIGHT = 280, 84
_GAP_X, _GAP_Y = 24, 44
_MARGIN = 10
_MOST_CHARACTERS = 38  # per line of a box


@final
@dataclass(frozen=True, slots=True)
class DrawnStage:
    """A box of the drawing.

    Attributes:
        name: Name of the stage, or CONSUMER.
        title: First line.
        lines: Smaller lines below the title.
        inputs: Names of the nodes above it.
        filled: Share of the bar at the bottom, 0 .. 1.
        marked: True for the bottleneck.
    """

    name: str
    title: str
    lines: tuple[str, ...]
    inputs: tuple[str, ...]
    filled: float
    marked: bool


def drawn_stages(stats: PipelineStats) -> list[DrawnStage]:
    """Return a node for each stage, and one for the consumer."""
    nodes = [_node(stage, marked=stage.name == stats.bottleneck) for stage in stats.stages]
    read = {name for node in nodes for name in node.inputs}
    waited = f"waited {percent(stats.consumer_waited)} of the time"
    slow = ("handing elements over takes longest",) if stats.bottleneck == HANDING_OVER else ()
    marked = stats.bottleneck in (CONSUMER, HANDING_OVER)
    ends = tuple(node.name for node in nodes if node.name not in read)
    return [*nodes, DrawnStage(CONSUMER, CONSUMER, (waited, *slow), ends, 1.0 - stats.consumer_waited, marked)]


def _node(stage: StageStats, *, marked: bool) -> DrawnStage:
    work = f"{quantity(stage.elements_per_s)}/s · {stage.where}"
    if stage.kind == "prefetch":
        filled = stage.queue_fill or 0.0
        return DrawnStage(
            stage.name, stage.name, (stage.label, f"{work} · {percent(filled)} full"), stage.inputs, filled, marked
        )
    lines = (stage.label, f"{work} · {percent(stage.busy)} busy")
    return DrawnStage(stage.name, stage.name, lines, stage.inputs, stage.busy, marked)


def lay_out(nodes: Sequence[DrawnStage]) -> Mapping[str, tuple[int, int]]:
    """Return the upper left corner of each box: as low as its readers allow, a column for each branch.

    Args:
        nodes: Inputs before their readers.
    """
    columns, levels = {nodes[-1].name: 0}, {nodes[-1].name: 0}
    used = 1
    for node in reversed(nodes):
        column, level = columns[node.name], levels[node.name]
        for number, name in enumerate(node.inputs):
            if name not in columns:
                columns[name] = column if number == 0 else used
                used += number > 0
            levels[name] = max(level + 1, levels.get(name, 0))
    top = max(levels.values())
    return {
        name: (_MARGIN + columns[name] * (_WIDTH + _GAP_X), _MARGIN + (top - level) * (_HEIGHT + _GAP_Y))
        for name, level in levels.items()
    }


def draw(stats: PipelineStats) -> str:
    """Return an `<svg>` element; its colours are CSS variables of the page."""
    nodes = drawn_stages(stats)
    corners = lay_out(nodes)
    width = max(x for x, _ in corners.values()) + _WIDTH + _MARGIN
    height = max(y for _, y in corners.values()) + _HEIGHT + _MARGIN
    arrows = [_arrow(corners[name], corners[node.name]) for node in nodes for name in node.inputs if name in corners]
    boxes = [_box(node, corners[node.name]) for node in nodes]
    return "\n".join(
        [
            f'<svg class="graph" role="img" aria-label="Graph of stages" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}">',
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            '<path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>',
            *arrows,
            *boxes,
            "</svg>",
        ]
    )


def _arrow(source: tuple[int, int], target: tuple[int, int]) -> str:
    x1, y1 = source[0] + _WIDTH // 2, source[1] + _HEIGHT
    x2, y2 = target[0] + _WIDTH // 2, target[1] - 2
    middle = (y1 + y2) // 2
    return f'<path class="arrow" marker-end="url(#tip)" d="M{x1} {y1}C{x1} {middle} {x2} {middle} {x2} {y2}"/>'


def _box(node: DrawnStage, corner: tuple[int, int]) -> str:
    x, y = corner
    texts = [
        f'<text class="small" x="14" y="{44 + 18 * row}">{_text(line)}</text>' for row, line in enumerate(node.lines)
    ]
    tag = f'<text class="tag" x="{_WIDTH - 14}" y="24">▲ bottleneck</text>' if node.marked else ""
    filled = round(node.filled * (_WIDTH - 4))
    return "\n".join(
        [
            f'<g class="box{" marked" if node.marked else ""}" transform="translate({x} {y})">',
            f"<title>{escape(' · '.join([node.title, *node.lines]))}</title>",
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="8"/>',
            f'<text class="title" x="14" y="24">{_text(node.title, 22 if node.marked else 30)}</text>{tag}',
            *texts,
            f'<rect class="track" x="2" y="{_HEIGHT - 10}" width="{_WIDTH - 4}" height="5" rx="2"/>',
            f'<rect class="bar" x="2" y="{_HEIGHT - 10}" width="{filled}" height="5" rx="2"/>',
            "</g>",
        ]
    )


def _text(text: str, most: int = _MOST_CHARACTERS) -> str:
    return escape(text if len(text) <= most else f"{text[: most - 1]}…")


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
svg.graph { display: block; margin: 0 auto; }
.box rect { fill: var(--card); stroke: var(--line); } .box .track { fill: var(--line); stroke: none; }
.box .bar { fill: var(--bar); stroke: none; }
.box.marked rect:first-of-type { stroke: var(--hot); stroke-width: 2.5; fill: var(--warm); }
.box.marked .bar { fill: var(--hot); }
.arrow { fill: none; stroke: var(--soft); stroke-width: 1.5; } .tip { fill: var(--soft); }
text { fill: var(--ink); font: 13px system-ui, sans-serif; } text.title { font-weight: 600; font-size: 14px; }
text.small { fill: var(--soft); font-size: 12.5px; }
text.tag { fill: var(--hot); font-weight: 600; font-size: 12px; text-anchor: end; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { padding: 6px 10px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
thead th { color: var(--soft); font-weight: 500; } tbody th { font-weight: 600; }
tbody tr:last-child > * { border-bottom: 0; }
.word { text-align: left; } .label { display: block; color: var(--soft); font-weight: 400; font-size: 12.5px; }
.meter { display: inline-block; width: 56px; height: 6px; margin-right: 8px; border-radius: 3px;
  background: var(--line); vertical-align: middle; overflow: hidden; }
.meter i { display: block; height: 100%; background: var(--bar); } tr.marked .meter i { background: var(--hot); }
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
