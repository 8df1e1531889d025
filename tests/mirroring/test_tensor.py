"""Mirrored parameters in everything else that PyTorch does with parameters, and the messages with their values."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raydist.core.errors import FailedPreconditionError
from raydist.mirroring.messages import TensorImage, answer
from raydist.mirroring.replica import MirrorReplica
from raydist.mirroring.tensor import MirroredTensor, record_of
from tests.mirroring.in_process import Mirror, linear


def mirrored(mirror: Mirror) -> Any:
    layer = linear(mirror)
    mirror.run(lambda: layer.training)
    assert type(layer.weight) is MirroredTensor
    return layer


def test_is_a_parameter_and_its_detached_alias_and_copies_are_not_mirrored(mirror: Mirror) -> None:
    layer = mirrored(mirror)
    assert isinstance(layer.weight, nn.Parameter)
    assert not isinstance(layer.weight.detach(), nn.Parameter)
    assert type(layer.weight + 1) is torch.Tensor
    for twin in (copy.deepcopy(layer.weight), pickle.loads(pickle.dumps(layer.weight)), copy.copy(layer.weight)):
        assert twin.tolist() == [[1.0, 2.0]]
        assert isinstance(twin, nn.Parameter)
    assert type(copy.deepcopy(layer.weight)) is nn.Parameter
    pair = copy.deepcopy([layer.weight, layer.weight])
    assert pair[0] is pair[1]
    with mirror.scope():
        norm = nn.BatchNorm1d(1)
        other = nn.Parameter(layer.weight)
    mirror.run(lambda: norm.training)
    assert type(copy.deepcopy(norm.running_mean)) is torch.Tensor
    assert repr(norm.running_mean) == "tensor([0.])"
    holder = [other]
    assert mirror.run(lambda: (holder[0] is layer.weight, holder[0].tolist())) == [(False, [[1.0, 2.0]])] * 2


def test_functional_call_and_vmap_on_the_driver(mirror: Mirror) -> None:
    layer = mirrored(mirror)
    parameters = dict(layer.named_parameters())
    result = torch.func.functional_call(layer, parameters, (torch.ones(2),))
    assert result.item() == 3.0
    gradients = torch.func.grad(lambda p: torch.func.functional_call(layer, p, (torch.ones(2),)).sum())(parameters)
    assert gradients["weight"].tolist() == [[1.0, 1.0]]


@pytest.mark.usefixtures("quick_gc")
def test_aliases_are_known_while_they_live(mirror: Mirror) -> None:
    ways: list[Callable[[Any], Any]] = [
        lambda weight: weight.detach(),
        lambda weight: weight.data[0].view(-1).data,
        lambda weight: weight.detach().numpy()[0],
        lambda weight: weight.data.unbind()[0].numpy(),
        lambda weight: next(iter(weight)).data,
        lambda weight: torch.from_numpy(weight.data.numpy()).detach(),
        lambda weight: np.split(np.asarray(weight.data), 1)[0],
        lambda weight: weight.data.chunk(1),
        lambda weight: nn.Parameter(weight),
        lambda weight: weight.untyped_storage(),
        lambda weight: weight.detach().untyped_storage()[:4],
    ]
    untracked: list[Callable[[Any], Any]] = [
        lambda weight: torch.utils.dlpack.from_dlpack(weight.detach()),
        lambda weight: np.from_dlpack(weight.detach()),
    ]
    for number, share in enumerate((*ways, *untracked)):
        layer = mirrored(mirror)
        aliases = record_of(layer.weight).aliases
        layer.weight.norm().item()
        assert not aliases.exist(layer.weight), number
        alias = share(layer.weight)
        assert aliases.exist(layer.weight), number
        del alias
        gc.collect()
        assert not aliases.exist(layer.weight) or share in untracked, number


def test_an_alias_of_memory_assigned_to_a_parameter(mirror: Mirror) -> None:
    layer = mirrored(mirror)
    memory = torch.zeros(1, 2)
    layer.weight.data = memory
    assert mirror.run(lambda: layer.weight.tolist()) == [[[0.0, 0.0]]] * 2
    memory.fill_(4.0)
    assert mirror.run(lambda: layer.weight.tolist()) == [[[4.0, 4.0]]] * 2
    layer.half()
    aliases = record_of(layer.weight).aliases
    mirror.run(lambda: layer.training)
    assert not aliases.exist(layer.weight)  # after the next step


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_image_is_exact() -> None:
    dense = torch.arange(6.0).reshape(2, 3)
    plain = [dense.t(), torch.tensor(2.5), torch.zeros(0, 2), torch.tensor([1.5]).bfloat16()]
    sparse = [dense.to_sparse(layout=layout) for layout in (torch.sparse_coo, torch.sparse_csr)]
    for tensor in (*plain, *sparse, torch.tensor([True, False]), torch.tensor([1 + 2j])):
        arrived = pickle.loads(pickle.dumps(TensorImage.of(tensor))).tensor()
        assert torch.equal(arrived.to_dense(), tensor.to_dense())
        assert (arrived.dtype, arrived.layout) == (tensor.dtype, tensor.layout)


def test_nothing_else_is_answered() -> None:
    method: Any
    for method in (MirrorReplica.parameters, MirrorReplica.tensor_images, len):
        with pytest.raises(FailedPreconditionError, match=r"raydist bug: .* methods of MirrorCalls only, got <"):
            answer(MirrorReplica(0), method)
