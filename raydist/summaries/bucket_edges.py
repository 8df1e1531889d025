"""TensorBoard's fixed histogram edges: the bucket of a value depends on the value only."""

from __future__ import annotations

import functools
import sys

import numpy as np

__all__ = ["bucket_edges"]


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
