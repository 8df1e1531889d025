"""Results as tables on the terminal and as JSON."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.pipelines.results import Comparison, Outcome


def table_of(comparison: Comparison) -> Table:
    """One workload: a line for each contender."""
    workload = comparison.workload
    caption = "; ".join(comparison.disagreements())
    table = Table(title=f"{workload.name}: {workload.description}", title_justify="left", caption=caption or None)
    table.add_column("contender")
    table.add_column(f"median {workload.unit}", justify="right")
    table.add_column("spread", justify="right")
    table.add_column(f"{comparison.outcomes[0].label} is", justify="right")
    for outcome in comparison.outcomes:
        table.add_row(*cells(comparison, outcome))
    return table


def cells(comparison: Comparison, outcome: Outcome) -> tuple[str, str, str, str]:
    """The columns of one contender."""
    if outcome.median is None:
        return outcome.label, f"not available: {outcome.problem}"[:70], "", ""
    ratio = comparison.ratio_to(outcome)
    is_first = outcome is comparison.outcomes[0]
    return (
        outcome.label,
        number(outcome.median),
        f"{100 * (outcome.spread or 0):.0f} %",
        "" if is_first or ratio is None else f"{ratio:.2f}x",
    )


def number(value: float) -> str:
    """With as many digits as say something."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def machine(*, smoke: bool, repeat: int, images: str) -> dict[str, Any]:
    """What has to be known about a run to judge its numbers."""
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "system": platform.platform(),
        "smoke": smoke,
        "repeat": repeat,
        "images": images,
    }


def write_json(path: Path, about: dict[str, Any], comparisons: Sequence[Comparison]) -> None:
    """Replace the file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    content = {"machine": about, "comparisons": [comparison.as_json() for comparison in comparisons]}
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    unfinished.replace(path)
