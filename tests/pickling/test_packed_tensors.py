"""Tensors of results, and small dataclasses, in packed form."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from raydist.core.nest import LEAF, flatten
from raydist.pickling.torch_objects import PackedNumber, PackedTensor, by_fields, pack_tensor
from raydist.replicas.results import StepResult
from raydist.replicas.step import PartSource
from raydist.replicas.step_message import GroupResult, StepMessage

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


@pytest.mark.parametrize("dtype", WHOLE)
def test_the_largest_whole_numbers_arrive(dtype: torch.dtype) -> None:
    most = 1 if dtype is torch.bool else torch.iinfo(dtype).max
    least = 0 if dtype is torch.bool else torch.iinfo(dtype).min
    for number in (most, least):
        arrived = travelled(torch.tensor(number, dtype=dtype))
        assert arrived.dtype is dtype
        assert int(arrived) == number


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16, torch.uint64])
def test_what_is_no_plain_number_is_an_array(dtype: torch.dtype) -> None:
    one = torch.tensor(3, dtype=dtype)
    assert isinstance(pack_tensor(one), PackedTensor)
    assert torch.equal(travelled(one), one)


def test_the_graph_stays_behind_and_later_changes_do_not_show() -> None:
    loss = torch.ones((), requires_grad=True) * 2
    rows = torch.zeros(3)
    kept, array = pack_tensor(loss), pack_tensor(rows)
    rows += 1
    assert isinstance(kept, PackedNumber)
    assert not kept.unpack().requires_grad
    assert isinstance(array, PackedTensor)
    assert array.unpack().tolist() == [0, 0, 0]


def test_what_numpy_does_not_know_is_a_tensor() -> None:
    sparse = torch.eye(2).to_sparse()
    packed = pack_tensor(sparse)
    assert isinstance(packed, torch.Tensor)
    assert packed is not sparse
    assert torch.equal(packed.to_dense(), torch.eye(2))


@dataclass(frozen=True, slots=True)
class Packed:
    first: int
    second: tuple[str, ...] = ()
    third: dict[str, int] = field(default_factory=dict, compare=False)

    __reduce__ = by_fields


@pytest.mark.parametrize(
    "value",
    [
        Packed(1, ("a", "b"), {"x": 3}),
        PartSource(None, value=b"x", on_host=True),
        StepMessage(b"headers", ((PartSource(1),), ()), (4, 5)),
        StepResult(LEAF, (3.0,), absent=True, rows=7),
        StepResult(flatten({"b": 1, "a": (2, None)})[1], (1, 2, None)),
    ],
)
def test_what_is_read_back_is_equal(value: object) -> None:
    assert pickle.loads(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)) == value


def test_all_fields_travel() -> None:
    read = pickle.loads(pickle.dumps(Packed(1, ("a",), {"x": 3})))
    assert read.third == {"x": 3}
    result = GroupResult((StepResult(LEAF, (1,)),), 2.5, None, ("remark",))
    back = pickle.loads(pickle.dumps(result))
    assert (back.results, back.seconds, back.error, back.remarks) == (result.results, 2.5, None, ("remark",))


def test_it_is_read_in_one_call() -> None:
    assert Packed(1).__reduce__() == (Packed, (1, (), {}))
