from __future__ import annotations

import pytest
import torch

from raydist.collectives.hierarchical.lane import HostReduction
from raydist.values import ReduceOp


@pytest.mark.parametrize("place", [0, 1, 2, 3])
@pytest.mark.parametrize(("op", "expected"), [(ReduceOp.SUM, 10.0), (ReduceOp.MEAN, 2.0), (ReduceOp.MAX, 4.0)])
def test_the_result_may_be_any_of_the_parts(place: int, op: ReduceOp, expected: float) -> None:
    parts = [torch.full((5,), value) for value in (1.0, 2.0, 3.0, 4.0)]
    HostReduction(op, world_size=5).between(parts, parts[place])
    assert parts[place].tolist() == [expected] * 5
    assert [part[0].item() for index, part in enumerate(parts) if index != place] == [
        value for index, value in enumerate((1.0, 2.0, 3.0, 4.0)) if index != place
    ]


def test_a_mean_is_divided_once() -> None:
    out = torch.empty(2)
    reduction = HostReduction(ReduceOp.MEAN, world_size=4)
    reduction.at_home([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])], out)
    assert out.tolist() == [4.0, 6.0]


@pytest.mark.parametrize("num_rows", [2, 7, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MIN, ReduceOp.MAX])
def test_rows_give_what_parts_give(op: ReduceOp, dtype: torch.dtype, num_rows: int) -> None:
    torch.manual_seed(0)
    rows = torch.randn(num_rows, 1000).mul(100).to(dtype)
    exact = rows.double() if op in (ReduceOp.MIN, ReduceOp.MAX) else rows.double().sum(0, keepdim=True)
    expected = {ReduceOp.MIN: exact.amin(0), ReduceOp.MAX: exact.amax(0)}.get(op, exact[0])
    out = torch.empty(1000, dtype=dtype)
    HostReduction(op, world_size=num_rows).rows_at_home(rows, out)
    # Halves are rounded once: half a step of theirs, not one for each row. Float32 is rounded with each row.
    step = 0.0 if dtype is torch.int32 else torch.finfo(dtype).eps
    on_the_way = num_rows * torch.finfo(torch.float32).eps * rows.double().abs().sum(0)
    assert ((out.double() - expected).abs() <= 0.501 * step * expected.abs() + on_the_way).all()
