from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raydist.errors import InvalidArgumentError
from raydist.parameter_servers.rows.sharded_embedding import UniqueRows


@given(st.lists(st.integers(0, 9)), st.none() | st.integers(0, 9))
def test_every_number_finds_its_row(numbers: list[int], padding: int | None) -> None:
    found = UniqueRows.of(torch.tensor(numbers, dtype=torch.int64), 10, padding)
    rows = found.rows.tolist()
    assert rows == sorted(set(numbers) - {padding})
    assert found.padded is (padding in numbers)
    assert [[*rows, padding][place] for place in found.places.tolist()] == numbers


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_smaller_integers(dtype: torch.dtype) -> None:
    found = UniqueRows.of(torch.tensor([[3, 1], [1, 1]], dtype=dtype), 10)
    assert (found.rows.tolist(), found.places.tolist()) == ([1, 3], [[1, 0], [0, 0]])
    assert found.rows.dtype is torch.int64


@pytest.mark.parametrize(
    ("numbers", "why"),
    [
        ([[1, 2], [3, 10]], r"between 0 and 9 \(num_embeddings=10\), got 10 at \[1, 1\]\. Look"),
        ([4, -1, 11], r"got -1 at \[1\]"),
        ([1.0, 2.0], r"given as integers, got torch\.float32\. Cast them"),
    ],
)
def test_what_is_no_row_is_named(numbers: list[float], why: str) -> None:
    with pytest.raises(InvalidArgumentError, match=why):
        UniqueRows.of(torch.tensor(numbers), 10)
