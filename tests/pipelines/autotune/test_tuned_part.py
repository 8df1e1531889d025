from __future__ import annotations

from raydist.pipelines.autotune.model import INLINE
from raydist.pipelines.autotune.tuned_part import Totals


def test_totals_begin_again_when_they_are_taken() -> None:
    totals = Totals(rows=10, blocks=2, busy_s=0.5, cpu_s=0.25, awaited_s=0.125, num_bytes=80)
    period = totals.take("map", INLINE)
    assert (period.name, period.setting, period.rows, period.blocks, period.num_bytes) == ("map", INLINE, 10, 2, 80)
    assert (period.busy_s, period.cpu_s, period.awaited_s) == (0.5, 0.25, 0.125)
    assert totals == Totals()
