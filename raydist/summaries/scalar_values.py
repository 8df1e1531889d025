"""Single numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, final

from raydist.summaries.record import Shown

__all__ = ["ScalarValue"]


@final
@dataclass(frozen=True, slots=True)
class ScalarValue(Shown):
    """A number.

    Attributes:
        value: It; a tensor of one number until it is settled.
        weight: What it weighs among those of other replicas.
        is_sum: They are added up, whatever they weigh.
    """

    value: Any
    weight: float = 1.0
    is_sum: bool = False

    def settled(self) -> Shown:
        return self if type(self.value) is float else replace(self, value=float(self.value))

    def joined(self, others: Sequence[Self]) -> Shown:
        every: Sequence[Self] = (self, *others)
        if self.is_sum:
            return replace(self, value=_sum([each.value for each in every]))
        weight = _sum([each.weight for each in every])
        if not weight:  # nobody had rows
            return replace(self, value=_sum([each.value for each in every]) / len(every))
        # What weighs nothing is left out: a mean of no rows is NaN.
        total = _sum([each.value * each.weight for each in every if each.weight])
        return replace(self, value=total / weight, weight=weight)


def _sum(values: Sequence[float]) -> float:
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
