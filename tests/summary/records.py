"""Records for tests."""

from __future__ import annotations

from raydist.summary.record import Record, SummaryData
from raydist.summary.scalars import ScalarValue


def record_of(name: str, shown: SummaryData | float, step: int = 0) -> Record:
    return Record("writer", name, step, ScalarValue(shown) if isinstance(shown, float) else shown, wall_time=1.0)
