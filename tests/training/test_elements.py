from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import raydist as rd
from raydist.training.elements import Example, apply_module, inputs_of, unpack


class Pair(NamedTuple):
    a: Any
    b: Any


@pytest.mark.parametrize(
    ("element", "expected"),
    [
        ((1, 2), Example(1, 2, None)),
        ((1, 2, 3), Example(1, 2, 3)),
        (({"a": 1}, (2, 3)), Example({"a": 1}, (2, 3), None)),
        (Pair(1, 2), Example(1, 2, None)),
    ],
)
def test_unpack(element: Any, expected: Example) -> None:
    assert unpack(element) == expected


@pytest.mark.parametrize(
    ("element", "got"),
    [(5, "a single int"), ((1,), "a tuple of 1"), ((1, 2, 3, 4), "a tuple of 4"), ({"x": 1}, "a dict")],
)
def test_unpack_refuses_other_elements(element: Any, got: str) -> None:
    with pytest.raises(rd.SpecError, match=rf"\(x, y\) or \(x, y, sample_weight\), got {got}.* dataset\.map"):
        unpack(element)


@pytest.mark.parametrize(
    ("element", "inputs"), [(5, 5), ((5,), 5), ((5, 6), 5), ((5, 6, 7), 5), ({"a": 5}, {"a": 5}), (((1, 2),), (1, 2))]
)
def test_inputs_of(element: Any, inputs: Any) -> None:
    assert inputs_of(element) == inputs


def test_inputs_of_refuses_longer_tuples() -> None:
    with pytest.raises(rd.SpecError, match="got a tuple of 4"):
        inputs_of((1, 2, 3, 4))


class Echo(nn.Module):
    def forward(self, *args: Any) -> tuple[Any, ...]:
        return args


@pytest.mark.parametrize(
    ("x", "args"), [((1, 2), (1, 2)), ({"a": 1}, ({"a": 1},)), (Pair(1, 2), (Pair(1, 2),)), (torch.ones(()), (1,))]
)
def test_a_plain_tuple_is_unpacked_into_arguments(x: Any, args: tuple[Any, ...]) -> None:
    assert apply_module(Echo(), x) == args
