"""Histograms: how many values lie in each of TensorBoard's buckets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np

from raydist.summaries.bucket_edges import bucket_edges
from raydist.summaries.record import Shown

__all__ = ["HistogramCounts"]


@final
@dataclass(frozen=True, slots=True)
class HistogramCounts(Shown):
    """How many values lie in each bucket.

    Attributes:
        first: Number of the first bucket that holds something.
        counts: From there to the last that does; empty where there are no values.
        least: The least value.
        most: The largest one.
        total: Their sum.
        squares: The sum of their squares.
        left_out: Values that are not finite, and are counted nowhere.
    """

    first: int = 0
    counts: Any = ()
    least: float = math.inf
    most: float = -math.inf
    total: float = 0.0
    squares: float = 0.0
    left_out: int = 0

    @property
    def num_bytes(self) -> int:
        return 128 + 8 * len(self.counts)

    @property
    def num_values(self) -> int:
        """How many values were counted."""
        return int(np.sum(self.counts, dtype=np.int64)) if len(self.counts) else 0

    def joined(self, others: Sequence[Self]) -> Shown:
        every: Sequence[Self] = [self, *others]
        filled = [each for each in every if len(each.counts)]
        first = min((each.first for each in filled), default=0)
        counts = np.zeros(max((each.first + len(each.counts) for each in filled), default=first) - first, np.int64)
        for each in filled:
            counts[each.first - first :][: len(each.counts)] += each.counts
        return HistogramCounts(
            first,
            counts,
            least=min(each.least for each in every),
            most=max(each.most for each in every),
            total=math.fsum(each.total for each in every),
            squares=math.fsum(each.squares for each in every),
            left_out=sum(each.left_out for each in every),
        )

    def buckets(self) -> list[tuple[float, float]]:
        """Right ends of buckets and how many values are in them, from one bucket before the first that is filled.

        Empty buckets beside each other are one, as TensorFlow writes them.
        """
        if not len(self.counts):
            return [(1e-12, 0.0)]
        edges = bucket_edges()[max(self.first - 1, 0) : self.first + len(self.counts)]
        counts = [0, *self.counts] if self.first else list(self.counts)
        found: list[tuple[float, float]] = []
        for edge, count in zip(edges, counts, strict=True):
            if not count and found and not found[-1][1]:
                found.pop()
            found.append((float(edge), float(count)))
        return found
