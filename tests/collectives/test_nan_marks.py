from __future__ import annotations

import math

import pytest
import torch

from raydist.collectives.tensors import COMBINERS, mark_nan, put_nan_back
from raydist.values import ReduceOp


def passing_over_nan(parts: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """As devices do that compare."""
    result = parts[0]
    for part in parts[1:]:
        result = torch.where(part > result if op is ReduceOp.MAX else part < result, part, result)
    return result


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_nan_of_any_part_comes_through(dtype: torch.dtype, op: ReduceOp) -> None:
    values = [-math.inf, -1.0, 0.0, 2.0, math.inf, math.nan]
    grid = torch.cartesian_prod(*[torch.tensor(values, dtype=dtype)] * 3)
    parts = list(grid.unbind(1))
    expected = COMBINERS[op](COMBINERS[op](parts[0], parts[1]), parts[2])
    assert not torch.equal(passing_over_nan(parts, op).isnan(), expected.isnan())
    found = put_nan_back(passing_over_nan([mark_nan(part, op) for part in parts], op))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
