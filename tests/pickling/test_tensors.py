"""Tensors that go through a pickle of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from raydist.pickling.pickler import dumps, loads
from raydist.pickling.tensors import TensorReducer


def through(obj: Any, *, device: str = "cpu", to_replica: bool = False) -> Any:
    data = dumps(obj, lambda _: None, to_replica=to_replica)
    return loads(data, lambda pid: device if pid == ("device",) else pid)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.tensor(3, dtype=torch.int8),
        torch.zeros(0, 4),
        torch.randn(3, dtype=torch.complex128),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ],
)
def test_values_strides_and_dtypes(tensor: torch.Tensor) -> None:
    copy = through(tensor)
    assert torch.equal(copy, tensor)
    assert (copy.dtype, copy.stride(), copy.shape) == (tensor.dtype, tensor.stride(), tensor.shape)
    assert type(copy) is torch.Tensor


@pytest.mark.parametrize("view", [torch.conj, lambda tensor: tensor.conj().imag], ids=["conjugated", "negated"])
def test_views_that_show_their_memory_otherwise(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = view(torch.tensor([1 + 2j, 3 - 1j]))
    assert torch.equal(through(tensor), tensor)


def test_copy_is_private_and_writable() -> None:
    tensor = torch.zeros(2)
    copy = through(tensor)
    copy += 1
    assert tensor.tolist() == [0.0, 0.0]


def test_views_share_memory() -> None:
    base = torch.arange(4.0)
    whole, part = through((base, base[1:3]))
    part.fill_(9.0)
    assert whole.tolist() == [0.0, 9.0, 9.0, 3.0]


def test_parameter_and_requires_grad() -> None:
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    leaf = torch.ones(1, requires_grad=True)
    result, other, same = through((frozen, leaf, frozen))
    assert type(result) is nn.Parameter
    assert (result.requires_grad, other.requires_grad) == (False, True)
    assert result is same


def test_result_of_a_computation_arrives_as_a_leaf() -> None:
    result = through(torch.ones(1, requires_grad=True) * 2)
    assert result.is_leaf
    assert result.item() == 2.0


def test_model_moves_to_the_replicas_device_and_counters_stay() -> None:
    moved = through([torch.ones(2), torch.tensor(1.0), nn.Parameter(torch.tensor(1.0))], device="meta", to_replica=True)
    assert [tensor.device.type for tensor in moved] == ["meta", "cpu", "meta"]
    assert through(torch.ones(2), device="meta").device.type == "cpu"


def test_sparse_tensors_are_left_to_torch() -> None:
    sparse = torch.eye(2).to_sparse()
    assert TensorReducer(to_replica=True).reduce(sparse) is None
    assert torch.equal(through(sparse).to_dense(), torch.eye(2))
