from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.core.nest import flatten
from raydist.pipelines.elements.spec import (
    BYTES,
    STR,
    DatasetSpec,
    TensorSpec,
    as_dtype,
    most_specific_common,
    spec_of_value,
)


@pytest.mark.parametrize("dtype", ["int32", np.int32, np.dtype("int32"), torch.int32])
def test_a_dtype_is_given_in_any_words(dtype: Any) -> None:
    assert TensorSpec((2,), dtype) == TensorSpec([2], np.int32)


def test_dtypes_of_text_and_none() -> None:
    assert (as_dtype("S7"), as_dtype(str)) == (BYTES, STR)
    with pytest.raises(InvalidArgumentError, match="made on the device"):
        as_dtype(torch.quint8)
    with pytest.raises(SpecError, match="Python objects"):
        as_dtype(object)


def test_accepts() -> None:
    spec = TensorSpec((None, 2), np.int64)
    assert spec.accepts(TensorSpec((5, 2), np.int64))
    assert not spec.accepts(TensorSpec((5, 3), np.int64))
    assert not spec.accepts(TensorSpec((5,), np.int64))
    assert not spec.accepts(TensorSpec((5, 2), np.int32))
    assert TensorSpec(None, np.int64).accepts(spec)
    assert not spec.accepts(TensorSpec(None, np.int64))


def test_most_specific_common() -> None:
    three, four = TensorSpec((3, 1), "u1"), TensorSpec((4, 1), "u1")
    assert most_specific_common(three, four) == TensorSpec((None, 1), "u1")
    assert most_specific_common(three, TensorSpec((), "u1")) == TensorSpec(None, "u1")
    assert most_specific_common(three, TensorSpec((3, 1), "i1")) is None


def test_a_spec_is_one_leaf_and_can_be_sent() -> None:
    spec = TensorSpec((None,), "S")
    assert flatten({"a": spec})[0] == [spec]
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert repr(spec) == "TensorSpec(shape=(None,), dtype=bytes)"
    assert spec.batched(3) == TensorSpec((3, None), "S")


def test_spec_of_value() -> None:
    assert spec_of_value("x") == TensorSpec((), STR)
    assert spec_of_value(np.array([b"x"], object)) == TensorSpec((1,), BYTES)
    with pytest.raises(SpecError, match="object array of int"):
        spec_of_value(np.array([1], object))


def test_datasets_of_common_elements_have_a_common_spec() -> None:
    short, long = (DatasetSpec(TensorSpec((size,), "int64")) for size in (2, 3))
    assert most_specific_common(short, long) == DatasetSpec(TensorSpec((None,), "int64"))
    assert most_specific_common(short, DatasetSpec(TensorSpec((2,), "str"))) is None
    pairs = [DatasetSpec((spec.element_spec, TensorSpec())) for spec in (short, long)]
    assert most_specific_common(*pairs) == DatasetSpec((TensorSpec((None,), "int64"), TensorSpec()))
    assert most_specific_common(pairs[0], short) is None
