"""Tables of stages as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import final

__all__ = ["HEADINGS", "Row", "percent", "quantity", "render", "workers_text"]

HEADINGS = ("stage", "where", "elements/s", "MB/s", "busy", "cpu", "queue", "waits for", "operation")

_LEFT = ("stage", "where", "waits for", "operation")


@final
@dataclass(frozen=True, slots=True)
class Row:
    """The cells of one stage, in the order of HEADINGS."""

    stage: str
    where: str
    elements: str
    megabytes: str
    busy: str
    cpu: str
    queue: str
    waits_for: str
    operation: str


def render(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table with aligned columns: words to the left, numbers to the right."""
    cells = [HEADINGS, *(astuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADINGS))]
    return ["  ".join(map(_aligned, HEADINGS, line, widths)).rstrip() for line in cells]


def _aligned(heading: str, cell: str, width: int) -> str:
    return cell.ljust(width) if heading in _LEFT else cell.rjust(width)


def quantity(number: float) -> str:
    """Format a number with three digits and a unit of thousands.

    >>> quantity(1_234_567), quantity(45_600), quantity(999), quantity(1.5)
    ('1.23 M', '45.6 k', '999', '1.5')
    """
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}" if number < 999.5 else "1 k"


def workers_text(number: int, place: str) -> str:
    """Format the number and kind of workers.

    >>> workers_text(1, "threads"), workers_text(4, "actors")
    ('1 thread', '4 actors')
    """
    return f"{number} {place.removesuffix('s') if number == 1 else place}"


def percent(share: float) -> str:
    """Format a share of 0 .. 1 as a whole percentage.

    >>> percent(0.126)
    '13 %'
    """
    return f"{share:.0%}".replace("%", " %")
