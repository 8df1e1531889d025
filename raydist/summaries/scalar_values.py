"""Summaries of single numbers."""

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
        value: The number; before `settled` possibly a tensor of one element.
        weight: Weight of the number among those of other replicas.
        is_sum: Add the numbers, regardless of weights.
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
        if not weight:  # no replica had rows
            return replace(self, value=_sum([each.value for each in every]) / len(every))
        # Values without weight are skipped: a mean of no rows is NaN.
        total = _sum([each.value * each.weight for each in every if each.weight])
        return replace(self, value=total / weight, weight=weight)


def _sum(values: Sequence[float]) -> float:
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
