"""Fast counting of values into TensorBoard's buckets, for which a step waits."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch

from raydist.summaries.bucket_edges import bucket_edges
from raydist.summaries.histogram_counts import HistogramCounts

__all__ = ["counted"]

_SHORT = 4096  # values: below this number, a search in the edges is as fast as tables
_WORDS = 1 << 16
_PIECE = 1 << 16  # values

_Array = np.ndarray[Any, np.dtype[Any]]


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
    if values.dtype != np.float32 or values.size < _SHORT:
        counts = np.bincount(_buckets(values), minlength=len(bucket_edges()))
        total, squares = float(values.sum(dtype=np.float64)), float(np.square(values, dtype=np.float64).sum())
    else:
        counts, total, squares = _counts_by_words(values)
    (filled,) = np.nonzero(counts)
    first, last = int(filled[0]), int(filled[-1])
    inside = counts[first : last + 1].astype(np.int64)
    return HistogramCounts(first, inside, float(values.min()), float(values.max()), total, squares)


def _buckets(values: _Array) -> _Array:
    edges = bucket_edges()
    return np.minimum(np.searchsorted(edges, values.astype(np.float64), side="right"), len(edges) - 1)


def _counts_by_words(values: _Array) -> tuple[_Array, float, float]:
    """Return counts, sum, and sum of squares.

    The upper half of a float32 determines one bucket or two, between which one comparison decides. For 800,000 values
    this takes 2 ms on one core, a search 40. Works in pieces that fit into a core's cache.
    """
    table = _word_table()
    tensor = torch.from_numpy(values if values.flags.writeable else values.copy())
    counts = torch.zeros(len(bucket_edges()), dtype=torch.int64)
    total = squares = 0.0
    for part in tensor.split(_PIECE):
        words = (part.view(torch.int32) >> 16).bitwise_and_(_WORDS - 1)
        above = part >= table.edges.index_select(0, words)
        counts += torch.bincount(table.buckets.index_select(0, words) + above, minlength=len(counts))
        exact = part.double()
        total += float(exact.sum())
        squares += float(torch.dot(exact, exact))
    return counts.numpy(), total, squares


@final
@dataclass(frozen=True, slots=True)
class _WordTable:
    """Buckets by the upper half of a float32, for all 65,536 halves.

    Attributes:
        buckets: The lowest bucket of the numbers with this upper half.
        edges: The smallest float32 of the next bucket; infinity if no number of the half is in it.
    """

    buckets: torch.Tensor
    edges: torch.Tensor


@functools.cache
def _word_table() -> _WordTable:
    words = np.arange(_WORDS, dtype=np.uint32) << 16
    with np.errstate(invalid="ignore"):  # some words are NaN
        ends = np.stack([words, words | 0xFFFF]).view(np.float32).astype(np.float64)
    finite = np.isfinite(ends).all(axis=0)
    low, high = np.where(finite, ends.min(axis=0), 0.0), np.where(finite, ends.max(axis=0), 0.0)
    buckets = _buckets(low)
    divided = finite & (_buckets(high) > buckets)
    edges = np.where(divided, _float32_from(bucket_edges()[buckets]), np.float32(np.inf))
    return _WordTable(torch.from_numpy(buckets.astype(np.int32)), torch.from_numpy(edges))


def _float32_from(edges: _Array) -> _Array:
    """Return the smallest float32 that is not less than each edge."""
    with np.errstate(over="ignore"):
        near = edges.astype(np.float32)
    return np.where(near.astype(np.float64) < edges, np.nextafter(near, np.float32(np.inf)), near)
