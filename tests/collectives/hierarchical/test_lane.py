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
