from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raydist.storage.marks import mark_of_bits


def same_mark(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(mark_of_bits(one) == mark_of_bits(other))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (1023,), (2, 1024), (5, 700)])
def test_the_same_bits_have_the_same_mark_whatever_the_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.rand(shape).mul(100).to(dtype)
    assert same_mark(tensor, tensor.clone())
    if tensor.numel():
        changed = tensor.clone()
        changed.view(-1)[-1] = ~changed.view(-1)[-1] if dtype is torch.bool else changed.view(-1)[-1] + 1
        assert not same_mark(tensor, changed)


@given(st.integers(2, 5000), st.data())
def test_two_numbers_that_change_places_change_the_mark(size: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, size - 2))
    second = data.draw(st.integers(first + 1, size - 1))
    tensor = torch.arange(size, dtype=torch.float32)
    swapped = tensor.clone()
    swapped[[first, second]] = tensor[[second, first]]
    assert not same_mark(tensor, swapped)


def test_a_matrix_that_is_turned_has_another_mark() -> None:
    matrix = torch.arange(64 * 64, dtype=torch.float32).reshape(64, 64)
    assert not same_mark(matrix, matrix.t().contiguous())
    assert not same_mark(matrix, matrix.flip(0))


def test_of_a_part_of_a_tensor_the_rest_counts_nothing() -> None:
    whole = torch.arange(6.0)
    before = mark_of_bits(whole[2:4])
    whole[0] = -1.0
    assert bool(mark_of_bits(whole[2:4]) == before)


def test_a_tensor_with_other_strides_is_read_in_its_own_order() -> None:
    matrix = torch.arange(6.0).reshape(2, 3).t()
    assert same_mark(matrix, matrix.contiguous())
