"""Messages between the driver and the replicas: steps, tensors, and calls."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from raydist.core.errors import FailedPreconditionError
from raydist.core.values import PerReplica
from raydist.mirroring.messages import MirrorCalls, StepPayload, TensorImage, Writes, answer, overwrite
from raydist.mirroring.replica import MirrorReplica


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(6.0).reshape(2, 3).t(), torch.tensor(2.5), torch.zeros(0, 2), torch.tensor([1.5]).bfloat16()]
    + [torch.tensor([True, False]), torch.tensor([1 + 2j])],
)
def test_image_is_exact(tensor: torch.Tensor) -> None:
    image = pickle.loads(pickle.dumps(TensorImage.of(tensor)))
    assert torch.equal(image.tensor(), tensor)
    assert image.tensor().dtype is tensor.dtype


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_image_of_a_sparse_tensor(layout: torch.layout) -> None:
    dense = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    image = pickle.loads(pickle.dumps(TensorImage.of(dense.to_sparse(layout=layout))))
    assert image.tensor().layout is layout
    assert torch.equal(image.tensor().to_dense(), dense)


def test_image_gives_private_memory() -> None:
    tensor = torch.zeros(2)
    copy = TensorImage.of(tensor).tensor()
    copy += 1
    assert tensor.tolist() == [0.0, 0.0]


def test_overwrite_in_place() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    address = parameter.data_ptr()
    overwrite(parameter, torch.ones(2))
    assert (parameter.tolist(), parameter.data_ptr()) == ([1.0, 1.0], address)
    overwrite(parameter, torch.ones(3, dtype=torch.float64))
    assert (parameter.dtype, parameter.shape) == (torch.float64, (3,))
    assert parameter.requires_grad


def test_an_expanded_tensor_gets_memory_that_it_can_be_written_to() -> None:
    tensor = torch.ones(1, 2).expand(3, 2)
    overwrite(tensor, torch.full((3, 2), 2.0))
    assert tensor.tolist() == [[2.0, 2.0]] * 3
    of_one = torch.ones(1, 2).expand(1, 2)
    address = of_one.data_ptr()
    overwrite(of_one, torch.zeros(1, 2))
    assert (of_one.tolist(), of_one.data_ptr()) == ([[0.0, 0.0]], address)


def test_writes_are_true_if_there_are_any() -> None:
    assert not Writes()
    assert Writes(requires_grad={1: False})
    assert Writes(cleared_gradients=[1])


def test_parts_stay_with_the_driver() -> None:
    payload = StepPayload(bundle=b"12", arguments=b"345", digest=b"d", per_replica=(PerReplica([1]),))
    received = pickle.loads(pickle.dumps(payload))
    assert received == payload.without_parts()
    assert received.per_replica == ()


def test_what_is_for_all_later_steps_and_what_for_one() -> None:
    whole = StepPayload(released=(1,), writes=b"w", function=b"f", digest=b"d", arguments=b"a")
    kept = whole.without_step()
    assert kept is not None
    assert (kept.released, kept.writes, kept.function, kept.arguments) == ((1,), b"w", b"f", b"")
    assert (whole.of_step().function, whole.of_step().digest, whole.of_step().arguments) == (b"", b"d", b"a")
    once = StepPayload(function=b"f", arguments=b"a")
    assert once.without_step() is None
    assert once.of_step().function == b"f"


CALLS = [method for name, method in vars(MirrorCalls).items() if inspect.isfunction(method) and name[0] != "_"]


@pytest.mark.parametrize("method", CALLS, ids=lambda method: str(method.__name__))
def test_every_call_travels_by_name(method: Callable[..., Any]) -> None:
    assert pickle.loads(pickle.dumps(method)) is method


def test_a_replica_answers_with_its_own_method() -> None:
    replica = MirrorReplica(0)
    assert answer(replica, MirrorCalls.tensor_images, [7]) == {}


@pytest.mark.parametrize("method", [MirrorReplica.parameters, MirrorReplica.tensor_images, len])
def test_nothing_else_is_answered(method: Any) -> None:
    with pytest.raises(FailedPreconditionError, match=r"raydist bug: .* methods of MirrorCalls only, got <"):
        answer(MirrorReplica(0), method)
