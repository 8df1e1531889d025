from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raydist.mirroring.buffers.shares import aggregate, share_of, wide

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False, width=64), min_size=1, max_size=5),
    st.sampled_from(FLOATS),
    st.integers(1, 50),
)
def test_shares_of_a_number_add_up_to_its_every_bit(numbers: list[float], dtype: torch.dtype, world_size: int) -> None:
    value = torch.tensor(numbers, dtype=dtype)
    value = torch.where(torch.isfinite(value), value, torch.zeros_like(value))
    shares = [share_of(value, rank, world_size) for rank in range(world_size)]
    assert {share.dtype for share in shares} == {dtype}
    assert torch.equal(aggregate(shares, "sum"), value)
    if world_size > 1:
        assert all(torch.equal(share, shares[1]) for share in shares[1:])


@given(st.integers(-(2**62), 2**62), st.integers(1, 9))
def test_shares_of_a_whole_number_are_whole(number: int, world_size: int) -> None:
    shares = [share_of(torch.tensor(number), rank, world_size) for rank in range(world_size)]
    assert aggregate(shares, "sum").item() == number
    assert abs(shares[0].item() - shares[-1].item()) < world_size


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_so(number: float) -> None:
    shares = [share_of(torch.tensor(number), rank, 3) for rank in range(3)]
    torch.testing.assert_close(aggregate(shares, "sum"), torch.tensor(number), equal_nan=True)


@pytest.mark.parametrize(("how", "expected"), [("sum", 3 + 1j), ("mean", 1.5 + 0.5j), ("first", 1 + 1j)])
def test_complex_numbers(how: str, expected: complex) -> None:
    values = [torch.tensor(1 + 1j, dtype=torch.complex64), torch.tensor(2, dtype=torch.complex64)]
    assert aggregate(values, how).item() == expected
    assert aggregate(values, how).dtype is torch.complex64


def test_sums_are_of_the_type_of_what_is_added() -> None:
    assert aggregate([torch.tensor(200, dtype=torch.uint8), torch.tensor(5, dtype=torch.uint8)], "sum").item() == 205
    assert wide(torch.tensor(1.0)).dtype is torch.float64
    assert wide(torch.tensor(1, dtype=torch.int8)).dtype is torch.int64
