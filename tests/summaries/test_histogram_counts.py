from __future__ import annotations

import numpy as np
import pytest

from raydist.summaries.counting import counted
from raydist.summaries.histogram_counts import HistogramCounts


def test_histograms_together_are_that_of_all_values() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=50), np.zeros(0), rng.normal(size=3) * 100]
    first, *others = map(counted, parts)
    joined, whole = first.joined(others), counted(np.concatenate(parts))
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
    joined = nothing.joined([nothing])
    assert isinstance(joined, HistogramCounts)
    assert joined.buckets() == [(1e-12, 0.0)]


def test_its_size_is_known() -> None:
    assert counted(np.array([1.0])).num_bytes < counted(np.arange(100.0)).num_bytes
