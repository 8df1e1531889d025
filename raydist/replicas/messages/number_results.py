"""What a group of steps returned that gave a tensor of one number each, a loss most often: told in columns. Pure.

One by one, six of them take a pickle of 40 calls of Python: 64 replicas on two cores wait for one another meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from raydist.nest import LEAF
from raydist.pickling.by_fields import by_fields
from raydist.pickling.travelling_tensors import TravellingNumber
from raydist.replicas.results import StepResult

__all__ = ["NumberResults"]


@final
@dataclass(slots=True)  # not frozen, as `StepResult`
class NumberResults:
    """Results of steps, in their order.

    Attributes:
        dtype: Of all numbers.
        values: They.
        absent: See `StepResult`.
        rows: See `StepResult`.
    """

    dtype: torch.dtype
    values: tuple[float, ...]
    absent: tuple[bool, ...]
    rows: tuple[int | None, ...]

    __reduce__ = by_fields

    @classmethod
    def of(cls, results: Sequence[StepResult]) -> NumberResults | None:
        """These; None where one is something else, or they are of several types."""
        values, absent, rows = [], [], []
        dtype: torch.dtype | None = None
        for result in results:
            leaf = result.leaves[0] if result.structure is LEAF else None
            if type(leaf) is not TravellingNumber or result.summaries or leaf.dtype is not (dtype or leaf.dtype):
                return None
            dtype = leaf.dtype
            values.append(leaf.value)
            absent.append(result.absent)
            rows.append(result.rows)
        return None if dtype is None else cls(dtype, tuple(values), tuple(absent), tuple(rows))

    def results(self) -> tuple[StepResult, ...]:
        """Each by itself."""
        columns = zip(self.values, self.absent, self.rows, strict=True)
        return tuple(
            StepResult(LEAF, (TravellingNumber(value, self.dtype),), absent, rows) for value, absent, rows in columns
        )
