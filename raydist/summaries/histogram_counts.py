"""Histograms: counts of values in TensorBoard's buckets."""

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
    """The counts of values in buckets.

    Attributes:
        first: Number of the first nonempty bucket.
        counts: Counts from `first` to the last nonempty bucket; empty without values.
        least: The smallest value.
        most: The largest value.
        total: Sum of the values.
        squares: Sum of the squares of the values.
        left_out: Number of skipped values that are not finite.
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
        """Number of counted values."""
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
        """Return right ends and counts of buckets, starting one bucket before the first nonempty one.

        Adjacent empty buckets are joined, as TensorFlow writes them.
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
