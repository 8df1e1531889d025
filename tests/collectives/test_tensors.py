"""Tensors of collectives: checks, staging, NaN, bytes, reductions on one rank."""

from __future__ import annotations

import math

import pytest
import torch

from raydist.collectives.tensors import (
    COMBINERS,
    check_rows,
    flat_bytes,
    mark_nan,
    put_nan_back,
    reduce_parts,
    stage_bytes,
    stage_reduction,
)
from raydist.core.errors import InvalidArgumentError
from raydist.core.values import ReduceOp

# --- staged tensors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shown", [[1 - 2j, 3 + 1j], [-2.0, 1.0]], ids=["conjugated", "negated"])
def test_a_view_that_shows_its_memory_otherwise_travels_as_it_shows_it(shown: list[complex]) -> None:
    tensor = torch.tensor([1 + 2j, 3 - 1j]).conj()
    view = tensor if isinstance(shown[0], complex) else tensor.imag
    assert stage_bytes(view).carrier.view(view.dtype).tolist() == shown
    staged = stage_reduction(view, ReduceOp.SUM, 1)
    assert torch.view_as_real(staged.carrier).shape[-1] == 2 if view.is_complex() else not staged.carrier.is_neg()
    staged.deliver()
    assert view.tolist() == shown


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", ["torch.sparse_coo", "meta", "quantized"])
def test_what_is_no_plain_memory_is_refused_before_it_travels(kind: str) -> None:
    dense = torch.eye(3)
    tensor = {
        "torch.sparse_coo": dense.to_sparse(),
        "meta": dense.to("meta"),
        "quantized": torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8),
    }[kind]
    with pytest.raises(InvalidArgumentError, match=rf"got a {kind} one of torch.\w+ \(3, 3\)"):
        stage_bytes(tensor)
    with pytest.raises(InvalidArgumentError, match="Convert"):
        stage_reduction(tensor, ReduceOp.SUM, 2)


# --- tensor checks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "outputs",
    [
        [torch.ones(2, 3)],
        [torch.ones(2, 3), torch.ones(2, 4)],
        [torch.ones(1, 3), torch.ones(5, 3)],
        [torch.ones(2, 3), torch.ones(5, 3, dtype=torch.int64)],
        [torch.ones(2, 3), torch.tensor(1.0)],
    ],
    ids=["one-too-few", "other-columns", "not-my-length", "other-dtype", "no-rows"],
)
def test_rows_that_do_not_fit(outputs: list[torch.Tensor]) -> None:
    check_rows([torch.ones(2, 3), torch.ones(0, 3)], torch.ones(2, 3), rank=0, world_size=2)
    with pytest.raises(InvalidArgumentError, match=r"2 tensors of torch.float32 \(any, 3\)"):
        check_rows(outputs, torch.ones(2, 3), rank=0, world_size=2)


# --- nan marks --------------------------------------------------------------------------------------------------------


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


# --- flat bytes -------------------------------------------------------------------------------------------------------

NUMBERS_FLAT_BYTES = torch.arange(24, dtype=torch.float32).reshape(4, 6)


@pytest.mark.parametrize(
    "tensor",
    [
        NUMBERS_FLAT_BYTES,
        NUMBERS_FLAT_BYTES[1],
        NUMBERS_FLAT_BYTES[:1, 1],
        NUMBERS_FLAT_BYTES[2:3, 3:4],
        NUMBERS_FLAT_BYTES[1, 1],
        NUMBERS_FLAT_BYTES[:0, ::2],
        NUMBERS_FLAT_BYTES[:, 1],
    ],
)
def test_shows_all_values_whatever_the_strides_are(tensor: torch.Tensor) -> None:
    flat = flat_bytes(tensor)
    assert flat.dtype == torch.uint8
    assert flat.stride() == (1,)
    assert flat.numpy().tobytes() == tensor.numpy().tobytes()


# --- reducing ---------------------------------------------------------------------------------------------------------


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
