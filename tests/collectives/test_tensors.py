"""Tensors of collectives: checks, staging, NaN, bytes, reductions on one rank."""

from __future__ import annotations

import itertools

import pytest
import torch

from raydist.collectives.tensors import (
    check_rows,
    reduce_parts,
    stage_bytes,
    stage_reduction,
)
from raydist.core.errors import InvalidArgumentError
from raydist.core.values import ReduceOp
from tests.cases import case


def test_a_view_that_shows_its_memory_otherwise_travels_as_it_shows_it() -> None:
    conjugated = torch.tensor([1 + 2j, 3 - 1j]).conj()
    for view, shown in ((conjugated, [1 - 2j, 3 + 1j]), (conjugated.imag, [-2.0, 1.0])):
        assert stage_bytes(view).carrier.view(view.dtype).tolist() == shown
        staged = stage_reduction(view, ReduceOp.SUM, 1)
        assert torch.view_as_real(staged.carrier).shape[-1] == 2 if view.is_complex() else not staged.carrier.is_neg()
        staged.deliver()
        assert view.tolist() == shown


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_is_no_plain_memory_is_refused_before_it_travels() -> None:
    dense = torch.eye(3)
    kinds = {
        "torch.sparse_coo": dense.to_sparse(),
        "meta": dense.to("meta"),
        "quantized": torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8),
    }
    for kind, tensor in kinds.items():
        with pytest.raises(InvalidArgumentError, match=rf"got a {kind} one of torch.\w+ \(3, 3\)"):
            stage_bytes(tensor)
        with pytest.raises(InvalidArgumentError, match="Convert"):
            stage_reduction(tensor, ReduceOp.SUM, 2)


def test_rows_that_do_not_fit() -> None:
    mine = torch.ones(2, 3)
    check_rows([mine, torch.ones(0, 3)], mine, rank=0, world_size=2)
    wrong = {
        "one too few": [mine],
        "other columns": [mine, torch.ones(2, 4)],
        "not my length": [torch.ones(1, 3), torch.ones(5, 3)],
        "other dtype": [mine, torch.ones(5, 3, dtype=torch.int64)],
        "no rows": [mine, torch.tensor(1.0)],
    }
    for name, outputs in wrong.items():
        with case(name), pytest.raises(InvalidArgumentError, match=r"2 tensors of torch.float32 \(any, 3\)"):
            check_rows(outputs, mine, rank=0, world_size=2)


def test_parts_are_added_up_in_their_order() -> None:
    before = torch.get_num_threads()
    for num_threads, numel in itertools.product((1, 2), (0, 5, 100_000)):
        parts = [torch.randn(numel, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
        out = torch.empty(numel)
        torch.set_num_threads(num_threads)
        try:
            reduce_parts(parts, out, ReduceOp.SUM)
        finally:
            torch.set_num_threads(before)
        assert torch.equal(out, parts[0] + parts[1] + parts[2] + parts[3]), (num_threads, numel)
    for place in (0, 1):  # of an early part, which the result may take
        parts = [torch.tensor([float(10**k)]) for k in range(4)]
        reduce_parts(parts, parts[place], ReduceOp.SUM)
        assert parts[place].item() == 1111.0, place


def test_halves_are_rounded_once() -> None:
    for dtype, op in ((torch.float16, ReduceOp.SUM), (torch.bfloat16, ReduceOp.MEAN)):
        parts = [torch.randn(70_000, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in range(7)]
        exact = torch.stack(parts).double().sum(0) / (7 if op is ReduceOp.MEAN else 1)
        reduce_parts(parts, parts[0], op)
        # Twice rounded (to float32 first) is off in rare ties.
        assert (parts[0] != exact.to(dtype)).float().mean() < 1e-3, (dtype, op)
    out = torch.empty(2, dtype=torch.bfloat16)
    reduce_parts([torch.tensor([value, -value], dtype=torch.bfloat16) for value in (1.0, 3.0, 2.0)], out, ReduceOp.MAX)
    assert out.tolist() == [3.0, -1.0]
