from __future__ import annotations

import numpy as np
import pytest
import torch

from raydist.collectives.tensors import check_reducible, stage_bytes, stage_comparable, stage_reduction
from raydist.errors import InvalidArgumentError
from raydist.values import ReduceOp

NUMBERS = [float("-inf"), -3.5, -1.0, -0.0, 0.0, 2.0**-14, 1.0, 7.25, float("inf")]


def test_a_plain_tensor_travels_itself() -> None:
    tensor = torch.ones(3)
    staged = stage_reduction(tensor, ReduceOp.SUM, 2)
    assert staged.carrier.data_ptr() == tensor.data_ptr()
    assert stage_bytes(tensor).carrier.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.uint32, torch.bool])
def test_a_dtype_that_gloo_lacks_travels_in_another(dtype: torch.dtype) -> None:
    tensor = torch.tensor([1, 0, 1]).to(dtype)
    staged = stage_reduction(tensor, ReduceOp.MAX, 2)
    assert staged.carrier.dtype in (torch.int32, torch.int64, torch.uint8)
    staged.carrier.copy_(torch.tensor([1, 1, 0]))
    staged.deliver()
    assert tensor.to(torch.int64).tolist() == [1, 1, 0]
    assert tensor.dtype == dtype


def test_a_strided_view_gets_its_result() -> None:
    base = torch.zeros(3, 2)
    staged = stage_reduction(base[:, 1], ReduceOp.MEAN, 4)
    staged.carrier.fill_(2.0)
    staged.deliver()
    assert base.tolist() == [[0.0, 0.5]] * 3


@pytest.mark.parametrize("shown", [[1 - 2j, 3 + 1j], [-2.0, 1.0]], ids=["conjugated", "negated"])
def test_a_view_that_shows_its_memory_otherwise_travels_as_it_shows_it(shown: list[complex]) -> None:
    tensor = torch.tensor([1 + 2j, 3 - 1j]).conj()
    view = tensor if isinstance(shown[0], complex) else tensor.imag
    assert stage_bytes(view).carrier.view(view.dtype).tolist() == shown
    staged = stage_reduction(view, ReduceOp.SUM, 1)
    assert torch.view_as_real(staged.carrier).shape[-1] == 2 if view.is_complex() else not staged.carrier.is_neg()
    staged.deliver()
    assert view.tolist() == shown


def test_bytes_keep_every_bit() -> None:
    tensor = torch.tensor([[1.5, float("nan")], [-0.0, 3.0]], dtype=torch.bfloat16).t()
    staged = stage_bytes(tensor)
    assert (staged.carrier.dtype, staged.carrier.numel()) == (torch.uint8, 8)
    staged.carrier.zero_()
    staged.deliver()
    assert tensor.tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (ReduceOp.MEAN, torch.int32),
        (ReduceOp.MEAN, torch.bool),
        (ReduceOp.SUM, torch.bool),
        (ReduceOp.MAX, torch.complex64),
        (ReduceOp.PRODUCT, torch.complex128),
    ],
)
def test_what_has_no_meaning(op: ReduceOp, dtype: torch.dtype) -> None:
    with pytest.raises(InvalidArgumentError, match=str(dtype)):
        check_reducible(dtype, op)


@pytest.mark.parametrize("dtype", [torch.uint64, torch.complex32, torch.float8_e4m3fn, torch.bits8, torch.quint8])
@pytest.mark.parametrize("op", ReduceOp)
def test_what_torch_cannot_add_up_is_refused_before_it_travels(op: ReduceOp, dtype: torch.dtype) -> None:
    with pytest.raises(InvalidArgumentError, match=f"torch cannot reduce values of {dtype}"):
        check_reducible(dtype, op)


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


def test_bytes_of_nothing() -> None:
    assert stage_bytes(torch.from_numpy(np.zeros(0, np.float32))).carrier.shape == (0,)


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_numbers_and_nan_come_back_from_the_marks(dtype: torch.dtype, op: ReduceOp) -> None:
    numbers = torch.tensor([*NUMBERS, float("nan"), -float("nan")], dtype=dtype)[:, None].expand(-1, 2).t().clone()
    before = numbers.clone()
    staged = stage_comparable(numbers, op, 2)
    assert not staged.carrier.isnan().any()
    staged.deliver()
    torch.testing.assert_close(numbers, before, rtol=0, atol=0, equal_nan=True)
