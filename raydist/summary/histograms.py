"""`rd.summary.histogram`: counts of values in the buckets of TensorBoard."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, final

import numpy as np

from raydist.core.errors import InvalidArgumentError
from raydist.summary.record import SummaryData, as_array
from raydist.summary.recording import record

_Array = np.ndarray[Any, np.dtype[Any]]


def histogram(name: str, data: Any, step: Any = None) -> bool:
    """Show the distribution of numbers at a step.

    Numbers are counted in their process, into buckets with fixed edges; in a step on several replicas the counts of
    all are added. NaN and infinite numbers are skipped, with one warning.

    Shapes: any.

    Args:
        name: Name of the histogram.
        data: The numbers.
        step: The step; None: the step of the writer's `as_default`, else the global step.

    Returns:
        True if there is a writer that takes the record; without one the call does nothing.

    Raises:
        InvalidArgumentError: `data` is not numeric, or `step` is not a whole number.

    Source: tf.summary.histogram; its edges are those of TensorFlow 1 and TensorBoard, so that counts can be added.

    >>> import torch
    >>> rd.summary.histogram("weights", torch.randn(3, 4), step=0)  # there is no writer
    False
    """
    return record(name, step, lambda weight: counted(_numbers(name, data)))


def _numbers(name: str, data: Any) -> np.ndarray[Any, np.dtype[Any]]:
    array = as_array(data)
    if array.dtype.kind not in "biuf":
        raise InvalidArgumentError(
            f"histogram {name!r} must be of real numbers, got {array.dtype}. Take e.g. the abs() of complex ones."
        )
    return array


def counted(values: _Array) -> HistogramCounts:
    """Return the histogram of an array of numbers of any shape. Values that are not finite are skipped.

    >>> import numpy as np
    >>> counted(np.array([1.0, 1.0, -2.0, np.nan])).num_values
    3
    """
    flat = np.ascontiguousarray(values).reshape(-1)
    if flat.dtype not in (np.float32, np.float64):
        flat = flat.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        found = _counts_of(flat)
        if not np.isfinite(found.total):
            finite = flat[np.isfinite(flat)]
            found = replace(_counts_of(finite), left_out=flat.size - finite.size)
    return found


def _counts_of(values: _Array) -> HistogramCounts:
    """Return counts that are valid if all values are finite."""
    if not values.size:
        return HistogramCounts()
    ordered = np.sort(values)  # faster than a search in the edges for each value
    ends = np.searchsorted(ordered, bucket_edges())  # number of values below each edge
    ends[-1] = len(ordered)  # the last bucket includes its edge
    counts = np.diff(ends, prepend=0)
    (filled,) = np.nonzero(counts)
    first, last = int(filled[0]), int(filled[-1])
    exact = values.astype(np.float64, copy=False)
    return HistogramCounts(
        first,
        counts[first : last + 1],
        least=float(ordered[0]),
        most=float(ordered[-1]),
        total=float(exact.sum()),
        squares=float(exact @ exact),
    )


@final
@dataclass(frozen=True, slots=True)
class HistogramCounts(SummaryData):
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

    def merged(self, others: Sequence[Self]) -> SummaryData:
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


@functools.cache
def bucket_edges() -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the right ends of all buckets, ascending; bucket i contains values >= edge i - 1 and < edge i.

    From 1e-12 to 1e20 each edge is 1.1 times the previous one; likewise below 0; plus 0 and the largest floats.

    Source: TensorFlow, `tensorflow/core/lib/histogram/histogram.cc`.
    """
    upper, edge = [], 1e-12
    while edge < 1e20:
        upper.append(edge)
        edge *= 1.1
    upper.append(sys.float_info.max)
    edges = np.array([*(-edge for edge in reversed(upper)), 0.0, *upper])
    edges.setflags(write=False)
    return edges
