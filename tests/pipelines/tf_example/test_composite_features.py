from __future__ import annotations

from collections.abc import Callable

import pytest

import raydist as rd
from raydist.pipelines.tf_example.composite_features import Feature, FixedLenSequenceFeature, SparseFeature
from tests.pipelines.formats.record_files import example


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
