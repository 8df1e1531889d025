"""Tables in markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.pipelines.report import number
from benchmarks.steps.bars import BARS, Bar
from benchmarks.steps.cpu import KINDS, SERVERS
from benchmarks.steps.figures import Figures, Measured, Table


def table_of(table: Table) -> str:
    """One workload: a line for each way to do it."""
    against = (f"of {label}" for label in table.workload.references)
    rate = [f"{table.workload.unit}/s"] if table.workload.unit else []
    titles = [table.workload.name, "ms", *rate, "spread", *against, *(f"CPU {kind}" for kind in _cpu_kinds(table))]
    return markdown(titles, [cells(table, one) for one in table.lines])


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under each other, the first one to the left; short rows are filled up."""
    full = [[*row, *[""] * (len(titles) - len(row))] for row in (titles, *rows)]
    widths = [max(len(row[place]) for row in full) for place in range(len(titles))]
    lines = [" | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in full]
    rule = "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])])
    return "\n".join([f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])])


def _cpu_kinds(table: Table) -> tuple[str, ...]:
    if not table.workload.tells_cpu:
        return ()
    return tuple(kind for kind in KINDS if kind != SERVERS or table.workload.servers)


def cells(table: Table, one: Measured) -> list[str]:
    """The columns of one line."""
    if one.outcome.median is None:
        return [one.line.name, f"not available: {one.outcome.problem}"[:40]]
    ratios = [table.ratio(one, label) for label in table.workload.references]
    cpu = [one.cpu_ms([kind]) or 0.0 for kind in _cpu_kinds(table)]
    return [
        one.line.name,
        number(one.outcome.median),
        *([number(1000 / one.outcome.median)] if table.workload.unit else []),
        f"{100 * (one.outcome.spread or 0):.0f} %",
        *("" if ratio is None else f"{ratio:.2f}x" for ratio in ratios),
        *(f"{value:.2f}" for value in cpu),
    ]


def bars_of(figures: Figures, bars: Sequence[Bar] = BARS) -> str:
    """Which bars are met; those that nothing was measured for are left out."""
    measured = [(bar, value) for bar in bars if (value := bar.value(figures)) is not None]
    return markdown(
        ["bar", "goal", "measured", ""],
        [
            [f"{bar.name} {bar.what}", bar.goal, f"{value:.3g} {bar.unit}", bar.verdict(value)]
            for bar, value in measured
        ],
    )


def write_json(path: Path, about: dict[str, Any], figures: Figures, bars: Sequence[Bar] = BARS) -> None:
    """Replace the file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    told = [
        {"bar": bar.name, "what": bar.what, "goal": bar.goal, "measured": value, "verdict": bar.verdict(value)}
        for bar, value in ((bar, bar.value(figures)) for bar in bars)
    ]
    tables = [table.as_json() for table in figures.tables]
    content = {"machine": about, "tables": tables, "findings": dict(figures.findings), "bars": told}
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    unfinished.replace(path)
