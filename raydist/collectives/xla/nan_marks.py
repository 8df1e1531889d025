"""MIN and MAX where some numbers are NaN: XLA's CPU device passes over those of other chips than the first.

So beside the numbers travels which of them are NaN, and these are put back when the result is there.
"""

from __future__ import annotations

import math

import torch

from raydist.values import ReduceOp

__all__ = ["mark_nan", "put_nan_back"]


def mark_nan(values: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """What is reduced by `op` (MIN or MAX) in place of floating-point `values`, along a new first dimension.

    >>> mark_nan(torch.tensor([1.0, float("nan")]), ReduceOp.MAX).tolist()
    [[1.0, -inf], [0.0, 1.0]]
    """
    sign = 1 if op is ReduceOp.MAX else -1
    found = values.isnan()
    return torch.stack([values.masked_fill(found, -sign * math.inf), found.to(values.dtype) * sign])


def put_nan_back(reduced: torch.Tensor) -> torch.Tensor:
    """The reduction of values that were marked: NaN wherever anybody had one.

    >>> put_nan_back(mark_nan(torch.tensor([1.0, float("nan")]), ReduceOp.MIN)).tolist()
    [1.0, nan]
    """
    return reduced[0].masked_fill(reduced[1] != 0, math.nan)
