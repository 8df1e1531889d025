from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import raydist as rd
from raydist.core.errors import InvalidArgumentError
from raydist.pipelines.tf_example.features import (
    LIST_FIELDS,
    FixedLenFeature,
    FixedLenSequenceFeature,
    SparseFeature,
    VarLenFeature,
)
from raydist.pipelines.tf_example.outputs import Feature
from tests.pipelines.formats.record_files import example


@pytest.mark.parametrize("dtype", ["float64", "int32", "bool", str, "str", "float16"])
def test_only_what_an_example_holds(dtype: Any) -> None:
    for make in (lambda: FixedLenFeature((), dtype), lambda: VarLenFeature(dtype)):
        with pytest.raises(InvalidArgumentError, match="must be int64, float32 or bytes .* got .*convert afterwards"):
            make()


def test_dtypes_are_given_as_numpy_torch_or_text() -> None:
    fields = [
        LIST_FIELDS[VarLenFeature(dtype).dtype] for dtype in (np.int64, "int64", "torch.int64", bytes, "bytes", "S")
    ]
    assert fields == ["int64_list"] * 3 + ["bytes_list"] * 3


def test_a_default_fills_the_shape() -> None:
    feature = FixedLenFeature([2, 2], "float32", 1)
    assert feature.default_value is not None
    assert feature.default_value.tolist() == [[1, 1], [1, 1]]
    assert feature.default_value.dtype == np.float32
    assert FixedLenFeature((), bytes, b"a\0").default_value == np.array(b"a\0", dtype=object)
    assert (FixedLenFeature(3, "int64").shape, FixedLenFeature((), "int64").num_values) == ((3,), 1)


@pytest.mark.parametrize(
    ("shape", "dtype", "default"),
    [
        ((2,), "int64", [1, 2, 3]),
        ((), "int64", 1.5),
        ((), "int64", b"x"),
        ((), bytes, "text"),
        ((2,), bytes, [b"a", 1]),
    ],
)
def test_a_default_of_another_kind(shape: Any, dtype: Any, default: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="default_value must be one .* value or an array of shape .*, got "):
        FixedLenFeature(shape, dtype, default)


@pytest.mark.parametrize("shape", [(None,), (-1,), (2, "a"), None])
def test_a_shape_is_fixed(shape: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="must hold only numbers >= 0, got .* Use VarLenFeature"):
        FixedLenFeature(shape, "int64")


def test_features_are_picklable() -> None:
    feature = pickle.loads(pickle.dumps(FixedLenFeature((1,), bytes, b"x")))
    assert repr(feature) == "FixedLenFeature(shape=(1,), dtype=bytes, default_value=[b'x'])"
    assert pickle.loads(pickle.dumps(VarLenFeature("int64"))) == VarLenFeature("int64")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedLenSequenceFeature((), "int64"), "must have allow_missing=True"),
        (lambda: FixedLenSequenceFeature((None,), "int64", allow_missing=True), r"numbers >= 1, got \(None,\)"),
        (lambda: FixedLenSequenceFeature((0,), "int64", allow_missing=True), r"numbers >= 1, got \(0,\)"),
        (lambda: FixedLenSequenceFeature((), "int64", True, "x"), "default_value must be one int64 value"),
        (lambda: FixedLenSequenceFeature((), "float64", True), "must be int64, float32 or bytes"),
        (lambda: SparseFeature(["a", "b"], "v", "int64", 3), r"got 1 sizes \(3\) and 2 keys"),
        (lambda: SparseFeature([], "v", "int64", []), "got 0 sizes"),
        (lambda: SparseFeature("a", "v", "int64", -1), "numbers >= 1, got -1"),
        (lambda: SparseFeature("a", "v", "str", 1), "must be int64, float32 or bytes"),
    ],
)
def test_bad_arguments(make: Callable[[], object], message: str) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=message):
        make()


def test_they_pass_through_a_pipeline() -> None:
    records = [example(i=[n], v=[0.5] * 1, t=[n] * n) for n in range(1, 5)]
    features: dict[str, Feature] = {"s": rd.SparseFeature("i", "v", "float32", 9), "r": rd.RaggedFeature("int64", "t")}
    dataset = rd.Dataset.from_tensor_slices(records).batch(2).map(lambda batch: rd.parse_example(batch, features))
    first, second = dataset.as_numpy_iterator()
    assert isinstance(first["s"], rd.SparseTensorValue)
    assert first["s"].indices.tolist() == [[0, 1], [1, 2]]
    assert isinstance(second["r"], rd.RaggedTensorValue)
    assert second["r"].values.tolist() == [3, 3, 3, 4, 4, 4, 4]
