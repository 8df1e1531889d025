from __future__ import annotations

import pytest
import torch

from raydist.collectives.flat_bytes import flat_bytes

NUMBERS = torch.arange(24, dtype=torch.float32).reshape(4, 6)


@pytest.mark.parametrize(
    "tensor", [NUMBERS, NUMBERS[1], NUMBERS[:1, 1], NUMBERS[2:3, 3:4], NUMBERS[1, 1], NUMBERS[:0, ::2], NUMBERS[:, 1]]
)
def test_shows_all_values_whatever_the_strides_are(tensor: torch.Tensor) -> None:
    flat = flat_bytes(tensor)
    assert flat.dtype == torch.uint8
    assert flat.stride() == (1,)
    assert flat.numpy().tobytes() == tensor.numpy().tobytes()


@pytest.mark.parametrize("tensor", [NUMBERS[1], NUMBERS[2:3, 3:4], NUMBERS[1, 1]])
def test_is_a_view_where_the_tensor_is_contiguous(tensor: torch.Tensor) -> None:
    assert flat_bytes(tensor).data_ptr() == tensor.data_ptr()
