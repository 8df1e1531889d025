from __future__ import annotations

import pytest
import torch

from raydist.storage.placed import PlacedTensor, TensorPlace
from raydist.storage.shard import VariableShard


def place(tensor: torch.Tensor) -> PlacedTensor:
    """The tensor in a new shard, with the values that it has."""
    size, stride = tuple(tensor.shape), tuple(tensor.stride())
    where = TensorPlace(0, tensor.dtype, size, stride, int(tensor.storage_offset()))
    shard = VariableShard.create_nameless([tensor.untyped_storage().nbytes()])
    where.within(shard.shared(0)).copy_(tensor)
    return PlacedTensor.bind(tensor, where, shard)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6, dtype=torch.int16).reshape(2, 3).t(),
        torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
        torch.arange(10.0)[3:7],
        torch.tensor(3.5, dtype=torch.bfloat16),
        torch.tensor([True, False, True]),
    ],
    ids=["plain", "transposed", "channels last", "a part", "bfloat16", "bool"],
)
def test_values_and_strides_are_kept(tensor: torch.Tensor) -> None:
    before = tensor.clone()
    stride = tensor.stride()
    placed = place(tensor)
    assert torch.equal(tensor, before)
    assert tensor.stride() == stride
    assert placed.in_place
    assert torch.equal(tensor, placed.shared)


def test_new_memory_is_seen() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    placed = place(parameter)
    parameter.data = parameter.data.t()
    assert not placed.in_place
    placed.show_own()
    assert placed.in_place
    parameter.data = parameter.data.clone()
    assert not placed.in_place
