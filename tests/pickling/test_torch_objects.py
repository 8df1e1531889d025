"""Tensors, optimizers, compiled functions, parametrized modules and packed results through a pickle."""

from __future__ import annotations

import functools
import pickle
import warnings
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from raydist.core.errors import FailedPreconditionError
from raydist.core.nest import LEAF, flatten
from raydist.pickling.pickler import dumps, loads
from raydist.pickling.torch_objects import (
    PackedNumber,
    PackedTensor,
    TensorReducer,
    original_of,
    pack_tensor,
    reduce_compiled,
    require_step_of_class,
)
from raydist.replicas.results import StepResult
from raydist.replicas.step import PartSource
from raydist.replicas.step_message import StepMessage
from tests.mirroring.in_process import Mirror, linear


def through(obj: Any, *, device: str = "cpu", to_replica: bool = False) -> Any:
    data = dumps(obj, lambda _: None, to_replica=to_replica)
    return loads(data, lambda pid: device if pid == ("device",) else pid)


def test_values_strides_and_dtypes() -> None:
    kinds = [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.tensor(3, dtype=torch.int8),
        torch.zeros(0, 4),
        torch.randn(3, dtype=torch.complex128),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ]
    for tensor in kinds:
        arrived = through(tensor)
        assert torch.equal(arrived, tensor)
        assert (arrived.dtype, arrived.stride(), arrived.shape) == (tensor.dtype, tensor.stride(), tensor.shape)
        assert type(arrived) is torch.Tensor
    conjugated = torch.tensor([1 + 2j, 3 - 1j]).conj()
    for view in (conjugated, conjugated.imag):
        assert torch.equal(through(view), view)
    whole, part = through(((base := torch.arange(4.0)), base[1:3]))
    part.fill_(9.0)
    assert whole.tolist() == [0.0, 9.0, 9.0, 3.0]  # views share memory
    sparse = torch.eye(2).to_sparse()
    assert TensorReducer(to_replica=True).reduce(sparse) is None  # left to torch
    assert torch.equal(through(sparse).to_dense(), torch.eye(2))


def test_parameters_requires_grad_and_results_of_a_computation() -> None:
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    leaf = torch.ones(1, requires_grad=True)
    result, other, same, computed = through((frozen, leaf, frozen, leaf * 2))
    assert type(result) is nn.Parameter
    assert (result.requires_grad, other.requires_grad) == (False, True)
    assert result is same
    assert computed.is_leaf
    assert computed.item() == 2.0


def test_model_moves_to_the_replicas_device_and_counters_stay() -> None:
    moved = through([torch.ones(2), torch.tensor(1.0), nn.Parameter(torch.tensor(1.0))], device="meta", to_replica=True)
    assert [tensor.device.type for tensor in moved] == ["meta", "cpu", "meta"]
    assert through(torch.ones(2), device="meta").device.type == "cpu"


def test_replaced_step_methods_are_found_but_the_wrapper_of_a_scheduler_is_none() -> None:
    optimizer: Any = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    require_step_of_class(optimizer)
    dumps(optimizer, lambda _: None, to_replica=False)
    optimizer.step = lambda *args: None
    told = r"this SGD has another `step`: <function .*register_step_pre_hook"
    for ask in (require_step_of_class, lambda it: dumps(it, lambda _: None, to_replica=False)):
        with pytest.raises(FailedPreconditionError, match=told):
            ask(optimizer)
    del optimizer.step
    require_step_of_class(optimizer)


ONES = torch.ones(2)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_arguments_of_torch_compile_are_recovered() -> None:
    compiled = torch.compile(double, backend="eager", dynamic=True, fullgraph=True)
    reduced = reduce_compiled(compiled)
    assert reduced is not None
    original, arguments = reduced[1]
    assert original is double
    assert (arguments["dynamic"], arguments["fullgraph"]) == (True, True)
    again = reduced[0](original, arguments)
    assert again(ONES).tolist() == [2.0, 2.0]
    assert reduce_compiled(again)[1] == reduced[1]  # type: ignore[index]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, when inductor is imported
        reduced = reduce_compiled(torch.compile(double, mode="reduce-overhead"))
    assert reduced is not None
    assert reduced[1][1]["options"]["triton.cudagraphs"] is True
    assert "backend" not in reduced[1][1]
    around = functools.wraps(compiled)(lambda x: compiled(x))
    assert original_of(compiled) is double
    assert [original_of(each) for each in (double, around, nn.Linear(1, 1), 3)] == [None] * 4


def test_compiled_step_trains_the_replicas_model(mirror: Mirror, layer: nn.Linear) -> None:
    with mirror.scope():
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)

    @torch.compile(backend="eager")
    def loss_of(x: torch.Tensor) -> Any:
        return layer(x).sum()

    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = loss_of(x)
        loss.backward()
        optimizer.step()
        return loss.item()

    assert mirror.run(step, ONES) == [3.0, 3.0]
    assert mirror.run(step, ONES) == [1.0, 1.0]
    assert layer.weight.tolist() == [[-1.0, 0.0]]


def test_compiled_function_called_on_the_driver(mirror: Mirror, layer: nn.Linear) -> None:
    @torch.compile(backend="eager")
    def forward(x: torch.Tensor) -> Any:
        return layer(x)

    assert forward(ONES).item() == 3.0
    assert mirror.run(lambda x: forward(x).item(), ONES) == [3.0, 3.0]
    for expected in (5.0, 7.0):
        mirror.run(lambda: layer.weight.data.add_(1).sum())
        assert forward(ONES).item() == expected


def test_compiled_module(mirror: Mirror, layer: nn.Linear) -> None:
    compiled: Any = torch.compile(layer, backend="eager")
    step = lambda x: (compiled(x).item(), compiled._orig_mod is layer, type(compiled).__name__)  # noqa: E731
    assert mirror.run(step, ONES) == [(3.0, True, "OptimizedModule")] * 2
    mirror.run(lambda: layer.weight.data.add_(1).sum())
    assert compiled(ONES).item() == 5.0
    assert compiled.state_dict()["_orig_mod.weight"].tolist() == [[2.0, 3.0]]
    compiled.eval()
    assert mirror.run(lambda: (layer.training, compiled.training)) == [(False, False)] * 2
    layer.weight.data.zero_()
    assert mirror.run(step, ONES)[1][0] == 0.0


class Double(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def test_parametrized_after_the_first_step_and_removed_again(mirror: Mirror) -> None:
    layer: Any = linear(mirror)
    value = lambda: layer(torch.ones(2)).item()  # noqa: E731
    assert mirror.run(value) == [3.0, 3.0]
    with mirror.scope():
        parametrize.register_parametrization(layer, "weight", Double())
    assert mirror.run(value) == [6.0, 6.0]
    assert type(layer).__name__ == "ParametrizedLinear"
    with mirror.scope():
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
    assert mirror.run(value) == [3.0, 3.0]
    assert mirror.run(lambda: type(layer)) == [nn.Linear] * 2
    mirror.driver.release()
    assert type(layer) is nn.Linear


@pytest.mark.parametrize(
    "norm", [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal]
)
def test_read_after_a_step_changed_an_attribute_or_failed(norm: Any, mirror: Mirror) -> None:
    with mirror.scope():
        model: Any = nn.Sequential(norm(nn.Linear(2, 2)), norm(nn.Linear(2, 2)))
    mirror.run(lambda: model.eval() and None)
    assert not model[0].training
    mirror.driver.reset()
    for layer in model:
        assert type(layer).__name__ == "ParametrizedLinear"
        assert layer.weight.shape == (2, 2)
    values = mirror.run(lambda: model[1].weight.detach())
    torch.testing.assert_close(values[1], model[1].weight.detach())
    mirror.driver.release()
    assert type(model[0]).__bases__ == (nn.Linear,)


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def travelled(tensor: torch.Tensor) -> torch.Tensor:
    packed = pickle.loads(pickle.dumps(pack_tensor(tensor)))
    return packed if isinstance(packed, torch.Tensor) else packed.unpack()


@given(number=st.floats(width=64), dtype=st.sampled_from(FLOATS))
def test_a_number_arrives_as_it_was(number: float, dtype: torch.dtype) -> None:
    given_ = torch.tensor(number, dtype=torch.float64).to(dtype)
    arrived = travelled(given_)
    assert arrived.dtype is dtype
    assert arrived.shape == ()
    assert torch.equal(arrived, given_) or (bool(arrived.isnan()) and bool(given_.isnan()))
    assert bool(torch.signbit(arrived) == torch.signbit(given_)) or bool(given_.isnan())


def test_other_tensors_are_packed_as_detached_copies() -> None:
    for dtype in WHOLE:
        for number in (1, 0) if dtype is torch.bool else (torch.iinfo(dtype).max, torch.iinfo(dtype).min):
            arrived = travelled(torch.tensor(number, dtype=dtype))
            assert (arrived.dtype, int(arrived)) == (dtype, number)
    for dtype in (torch.complex64, torch.uint16, torch.uint64):  # no plain numbers
        one = torch.tensor(3, dtype=dtype)
        assert isinstance(pack_tensor(one), PackedTensor)
        assert torch.equal(travelled(one), one)
    loss = torch.ones((), requires_grad=True) * 2
    rows = torch.zeros(3)
    kept, array = pack_tensor(loss), pack_tensor(rows)
    rows += 1
    assert isinstance(kept, PackedNumber)
    assert not kept.unpack().requires_grad
    assert isinstance(array, PackedTensor)
    assert array.unpack().tolist() == [0, 0, 0]
    sparse = torch.eye(2).to_sparse()
    packed = pack_tensor(sparse)
    assert isinstance(packed, torch.Tensor)
    assert packed is not sparse
    assert torch.equal(packed.to_dense(), torch.eye(2))


def test_unpickled_values_are_equal() -> None:
    values = [
        PartSource(None, value=b"x", on_host=True),
        StepMessage(b"headers", ((PartSource(1),), ()), (4, 5)),
        StepResult(LEAF, (3.0,), absent=True, rows=7),
        StepResult(flatten({"b": 1, "a": (2, None)})[1], (1, 2, None)),
    ]
    assert pickle.loads(pickle.dumps(values, pickle.HIGHEST_PROTOCOL)) == values
