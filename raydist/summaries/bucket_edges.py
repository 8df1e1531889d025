"""TensorBoard's fixed edges of histograms: where a value is counted depends on nothing but the value."""

from __future__ import annotations

import functools
import sys

import numpy as np

__all__ = ["bucket_edges"]


@functools.cache
def bucket_edges() -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The right ends of all buckets, rising; bucket i holds what is >= edge i - 1 and < edge i.

    From 1e-12 to 1e20 each is a tenth larger than the one before; the same below 0; 0 itself; the largest numbers.

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
