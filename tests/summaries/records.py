"""Records for tests."""

from __future__ import annotations

from raydist.summaries.record import Record, Shown
from raydist.summaries.scalar_values import ScalarValue


def record_of(name: str, shown: Shown | float, step: int = 0) -> Record:
    return Record("writer", name, step, ScalarValue(shown) if isinstance(shown, float) else shown, wall_time=1.0)
