from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest
import torch

from raydist.core.errors import SpecError
from raydist.pipelines.elements.leaf_values import as_leaf, is_torch


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [
        (1, "int64", ()),
        (1.5, "float32", ()),
        (True, "bool", ()),
        (1j, "complex128", ()),
        (Color.RED, "int64", ()),
        (np.float64(1), "float64", ()),
        (np.zeros(2, ">i4"), "int32", (2,)),
        ([1, 2], "int64", (2,)),
        ([1, 2.5], "float32", (2,)),
        ([[1.0], [2.0]], "float32", (2, 1)),
        ([np.float64(1), np.float64(2)], "float64", (2,)),
        ([np.zeros(2, np.uint8)] * 3, "uint8", (3, 2)),
        ([torch.ones(2)] * 2, "float32", (2, 2)),
        ([], "float32", (0,)),
        (torch.ones(2, 3, dtype=torch.float16, requires_grad=True), "float16", (2, 3)),
        (torch.tensor(1 + 1j).conj(), "complex64", ()),
    ],
)
def test_dtype_and_shape(value: Any, dtype: str, shape: tuple[int, ...]) -> None:
    leaf = as_leaf(value)
    assert (leaf.dtype.name, leaf.shape) == (dtype, shape)


def test_tuples_in_lists_are_part_of_the_tensor() -> None:
    assert as_leaf([(1, 2), (3, 4)]).tolist() == [[1, 2], [3, 4]]
    assert as_leaf([(1, 2), (3, 4)]).dtype == "int64"
    assert as_leaf([([1.5, 2], (3, 4))]).shape == (1, 2, 2)
    assert as_leaf([(np.float64(1), 2), (3, 4)]).dtype == "float64"
    assert as_leaf([("a", "b"), ("c", "d")]).shape == (2, 2)
    with pytest.raises(SpecError, match="must be rectangular"):
        as_leaf([(1, 2), (3,)])


def test_text() -> None:
    assert as_leaf(np.bytes_(b"a")) == b"a"
    assert type(as_leaf(np.str_("a"))) is str
    assert as_leaf(np.array(["a", "bc"])).tolist() == ["a", "bc"]
    assert as_leaf([[b"a"], [b"b"]]).shape == (2, 1)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "got None of type builtins.NoneType"),
        ([[1], [1, 2]], "must be rectangular"),
        (["a", 1], "must hold one type"),
        (np.array([1, "a"], object), "object array of int, str"),
        (np.zeros(1, "V3"), "got dtype"),
    ],
)
def test_what_is_no_leaf_says_why(value: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        as_leaf(value)


def test_torch_is_known_by_its_name() -> None:
    assert is_torch(torch.zeros(1))
    assert is_torch(torch.nn.Parameter(torch.zeros(1)))
    assert not is_torch(np.zeros(1))
    assert not is_torch(torch.float32)
