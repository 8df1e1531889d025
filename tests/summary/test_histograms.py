"""Histograms: buckets, counts, merging."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tensorboardX.writer import SummaryWriter as Peer

from raydist.summary.histograms import HistogramCounts, bucket_edges, counted


def expected(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Counts by numpy, in all buckets."""
    return np.histogram(values.astype(np.float64), bins=np.concatenate([[-np.inf], bucket_edges()]))[0]


def dense(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    found = counted(values)
    counts = np.zeros(len(bucket_edges()), np.int64)
    counts[found.first : found.first + len(found.counts)] = found.counts
    return counts


def test_every_float32_is_counted_where_a_search_finds_it() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    edges = bucket_edges()[np.abs(bucket_edges()) < 3e38].astype(np.float32)
    around = np.concatenate([edges, np.nextafter(edges, np.float32(np.inf)), np.nextafter(edges, np.float32(-np.inf))])
    values = np.concatenate([bits[np.isfinite(bits)], around, np.array([0.0, -0.0], np.float32)])
    assert (dense(values) == expected(values)).all()


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64, np.uint8, np.bool_])
def test_numbers_of_every_type_are_counted(dtype: Any) -> None:
    values = np.arange(-3, 4).astype(dtype)
    found = counted(values.reshape(7, 1))
    assert (dense(values) == expected(values.astype(np.float64))).all()
    assert (found.total, found.squares) == (float(values.sum()), float(np.square(values.astype(float)).sum()))
    assert (found.least, found.most) == (float(values.min()), float(values.max()))


def test_the_largest_numbers_are_in_the_outermost_buckets() -> None:
    most = np.finfo(np.float64).max
    assert counted(np.array([most, -most, 1e300])).num_values == 3


def test_what_is_not_finite_is_left_out_and_told() -> None:
    found = counted(np.array([np.nan, np.inf, -np.inf, 1.0]))
    assert (found.num_values, found.left_out, found.total) == (1, 3, 1.0)
    assert counted(np.array([np.nan])).num_values == 0
    assert counted(np.zeros(0)).left_out == 0


def test_sums_that_overflow_are_of_finite_numbers_all_the_same() -> None:
    assert counted(np.array([1.7e308, 1.7e308])).num_values == 2


def test_edges_are_those_of_tensorboard() -> None:
    theirs = Peer(write_to_disk=False).default_bins
    assert bucket_edges()[1:-1].tolist() == theirs
    assert bucket_edges()[0] == -np.finfo(np.float64).max
    assert bucket_edges()[-1] == np.finfo(np.float64).max


def test_histograms_together_are_that_of_all_values() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=50), np.zeros(0), rng.normal(size=3) * 100]
    first, *others = map(counted, parts)
    joined, whole = first.merged(others), counted(np.concatenate(parts))
    assert isinstance(joined, HistogramCounts)
    assert joined.buckets() == whole.buckets()
    assert (joined.least, joined.most, joined.num_values) == (whole.least, whole.most, 53)
    assert joined.total == pytest.approx(whole.total)
    assert joined.squares == pytest.approx(whole.squares)


def test_buckets_begin_before_the_first_that_is_filled_and_empty_ones_are_one() -> None:
    buckets = counted(np.array([1.0, 1.0, 5.0])).buckets()
    assert [count for _, count in buckets] == [0.0, 2.0, 0.0, 1.0]
    ends = [end for end, _ in buckets]
    assert ends[0] < 1.0 < ends[1] < ends[2] < 5.0 < ends[3]


def test_of_no_values_there_is_one_empty_bucket() -> None:
    nothing = counted(np.zeros(0))
    joined = nothing.merged([nothing])
    assert isinstance(joined, HistogramCounts)
    assert joined.buckets() == [(1e-12, 0.0)]


def test_its_size_is_known() -> None:
    assert counted(np.array([1.0])).num_bytes < counted(np.arange(100.0)).num_bytes
