"""The graph of stages as a drawing: pure functions from statistics to SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import final

from raydist.pipelines.metering.bottleneck import CONSUMER, HANDING_OVER
from raydist.pipelines.metering.stats import PipelineStats, StageStats
from raydist.pipelines.metering.stats_table import percent, quantity

__all__ = ["DrawnStage", "draw", "drawn_stages", "lay_out"]

_WIDTH, _HEIGHT = 280, 84
_GAP_X, _GAP_Y = 24, 44
_MARGIN = 10
_MOST_CHARACTERS = 38  # that fit into a box


@final
@dataclass(frozen=True, slots=True)
class DrawnStage:
    """A box of the drawing.

    Attributes:
        name: Name of the stage, or CONSUMER.
        title: First line.
        lines: Smaller ones below it.
        inputs: Names of the nodes above it.
        filled: Share of the bar at its bottom, 0 .. 1.
        marked: Whether it is the bottleneck.
    """

    name: str
    title: str
    lines: tuple[str, ...]
    inputs: tuple[str, ...]
    filled: float
    marked: bool


def drawn_stages(stats: PipelineStats) -> list[DrawnStage]:
    """A node for each stage, and one for the consumer."""
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
    """Left upper corner of each box: as far down as its readers let it, a column for each branch.

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
    """An `<svg>` element; its colours are CSS variables of the page around it."""
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
