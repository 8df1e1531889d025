from __future__ import annotations

import pytest
import torch

from raydist.collectives.tensors import reduce_parts
from raydist.values import ReduceOp


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("numel", [0, 5, 100_000])
def test_parts_are_added_up_in_their_order(num_threads: int, numel: int) -> None:
    parts = [torch.randn(numel, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    out = torch.empty(numel)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        reduce_parts(parts, out, ReduceOp.SUM)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(out, parts[0] + parts[1] + parts[2] + parts[3])


@pytest.mark.parametrize("place", [0, 1])
def test_the_result_may_take_the_place_of_an_early_part(place: int) -> None:
    parts = [torch.tensor([float(10**k)]) for k in range(4)]
    reduce_parts(parts, parts[place], ReduceOp.SUM)
    assert parts[place].item() == 1111.0


def test_one_part_is_copied() -> None:
    out = torch.zeros(2)
    reduce_parts([torch.tensor([1.0, 2.0])], out, ReduceOp.PRODUCT)
    assert out.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN])
def test_halves_are_rounded_once(dtype: torch.dtype, op: ReduceOp) -> None:
    parts = [torch.randn(70_000, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in range(7)]
    exact = torch.stack(parts).double().sum(0) / (7 if op is ReduceOp.MEAN else 1)
    reduce_parts(parts, parts[0], op)
    # Twice rounded (to float32 first) is off in rare ties.
    assert (parts[0] != exact.to(dtype)).float().mean() < 1e-3


def test_halves_that_are_not_added_keep_their_order() -> None:
    out = torch.empty(2, dtype=torch.bfloat16)
    reduce_parts([torch.tensor([value, -value], dtype=torch.bfloat16) for value in (1.0, 3.0, 2.0)], out, ReduceOp.MAX)
    assert out.tolist() == [3.0, -1.0]
