from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.pipelines.tf_example.features import (
    FixedLenFeature,
    FixedLenSequenceFeature,
    SparseFeature,
    SparseTensorValue,
)
from raydist.pipelines.tf_example.outputs import Feature, FixedColumn, RaggedColumn, row_lengths
from raydist.pipelines.tf_example.parse import example_class, parse_example
from raydist.pipelines.tf_example.ragged_features import RaggedFeature, RaggedTensorValue, RowPartition
from tests.pipelines.formats.record_files import example


def parse(records: Any, feature: Feature) -> Any:
    return parse_example(records, {"x": feature})["x"]


def test_sequences_are_padded_to_the_longest() -> None:
    records = [example(x=[1, 2, 3, 4]), example(), example(x=[5, 6])]
    found = parse(records, FixedLenSequenceFeature((2,), "int64", allow_missing=True, default_value=-1))
    assert found.tolist() == [[[1, 2], [3, 4]], [[-1, -1], [-1, -1]], [[5, 6], [-1, -1]]]
    texts = FixedLenSequenceFeature((), bytes, allow_missing=True)
    assert parse([example(x=[b"a"]), example()], texts).tolist() == [[b"a"], [b""]]
    assert parse(records[0], FixedLenSequenceFeature(2, "int64", allow_missing=True)).tolist() == [[1, 2], [3, 4]]
    assert parse([], FixedLenSequenceFeature((2,), "int64", allow_missing=True)).shape == (0, 0, 2)
    with pytest.raises(InvalidArgumentError, match=r"a multiple of 2 values .*, but record 1 holds 3"):
        parse([b"", example(x=[1, 2, 3])], FixedLenSequenceFeature((2,), "int64", allow_missing=True))


def test_sparse_features() -> None:
    feature = SparseFeature("i", "v", "float32", 100)
    records = [example(i=[7, 3], v=[0.5, 1.5]), example(), example(i=[99], v=[2.5])]
    found = parse(records, feature)
    assert isinstance(found, SparseTensorValue)
    assert found.indices.tolist() == [[0, 3], [0, 7], [2, 99]]
    assert found.values.tolist() == [1.5, 0.5, 2.5]
    assert found.dense_shape.tolist() == [3, 100]
    alone = parse(records[0], feature)
    assert (alone.indices.tolist(), alone.dense_shape.tolist()) == ([[3], [7]], [100])
    as_given = parse(records[0], SparseFeature("i", "v", "float32", 100, already_sorted=True))
    assert as_given.values.tolist() == [0.5, 1.5]
    nothing = parse([], feature)
    assert (nothing.indices.shape, nothing.values.dtype, nothing.dense_shape.tolist()) == ((0, 2), np.float32, [0, 100])


def test_sparse_features_of_several_dimensions() -> None:
    record = example(row=[1, 0, 1], column=[0, 2, 1], v=[b"c", b"a", b"d"])
    found = parse([record], SparseFeature(["row", "column"], "v", bytes, [2, 3]))
    assert found.indices.tolist() == [[0, 0, 2], [0, 1, 0], [0, 1, 1]]
    assert found.values.tolist() == [b"a", b"c", b"d"]
    assert found.dense_shape.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (example(i=[1], v=[0.5, 1.5]), "one index for each value, but record 1 holds 1 in 'i' and 2 values in 'v'"),
        (example(i=[4], v=[0.5]), r"indices in \[0, 4\), but record 1 holds 4 .. 4 in 'i'"),
        (example(i=[-1], v=[0.5]), r"indices in \[0, 4\), but record 1 holds -1"),
        (example(i=[0.5], v=[0.5]), "Feature 'i' must hold int64 values"),
    ],
)
def test_sparse_features_that_do_not_fit(record: bytes, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        parse([b"", record], SparseFeature("i", "v", "float32", 4))


def test_ragged_features() -> None:
    records = [example(x=[1, 2, 3]), example(), example(x=[4])]
    found = parse(records, RaggedFeature("int64"))
    assert isinstance(found, RaggedTensorValue)
    assert found.values.tolist() == [1, 2, 3, 4]
    assert (found.row_splits.tolist(), found.row_splits.dtype) == ([0, 3, 3, 4], np.int32)
    assert parse(records[0], RaggedFeature("int64")).tolist() == [1, 2, 3]
    assert parse([], RaggedFeature("int64", row_splits_dtype="int64")).row_splits.tolist() == [0]


def test_ragged_features_with_partitions() -> None:
    records = [example(v=[1, 2, 3, 4, 5], inner=[2, 0, 3], outer=[0, 1, 3]), example(), example(v=[6], inner=[1])]
    feature = RaggedFeature("int64", "v", [RaggedFeature.RowSplits("outer"), RaggedFeature.RowLengths("inner")])
    alone = parse(records[0], feature)
    assert alone.row_splits.tolist() == [0, 1, 3]
    assert alone.values.row_splits.tolist() == [0, 2, 2, 5]
    assert alone.values.values.tolist() == [1, 2, 3, 4, 5]
    found = parse(records[:2], feature)
    assert found.row_splits.tolist() == [0, 2, 2]
    assert found.values.row_splits.tolist() == [0, 1, 3]
    assert found.values.values.row_splits.tolist() == [0, 2, 2, 5]
    with pytest.raises(
        InvalidArgumentError, match=r"row_splits that fit its 1 values, but record 2 has \[\] in 'outer'"
    ):
        parse(records, feature)
    uniform = parse(records[0], RaggedFeature("int64", "outer", [RaggedFeature.UniformRowLength(3)]))
    assert (uniform.values.tolist(), uniform.row_splits.tolist()) == ([0, 1, 3], [0, 3])


def feature_map(**features: Any) -> Any:
    return example_class().FromString(example(**features)).features.feature


def test_a_fixed_column_takes_records_one_by_one_and_many_at_once() -> None:
    for shape, rows in (((), [3, 4, 5]), ((1,), [[3], [4], [5]])):
        column = FixedColumn("x", FixedLenFeature(shape, "int64"), 3)
        column.add(feature_map(x=[4]), 1)
        column.fill(np.array([0, 2]), np.array([[3], [5]]))
        assert column.array().tolist() == rows
        assert column.num_values == 1


def test_a_ragged_column_takes_any_number() -> None:
    column = RaggedColumn("x", np.dtype(np.int64), 3)
    column.add(feature_map(x=[4, 5]), 1)
    column.fill(np.array([2]), np.array([[6, 7, 8]]))
    assert [row.tolist() for row in column.array()] == [[], [4, 5], [6, 7, 8]]
    assert column.num_values is None
    with pytest.raises(InvalidArgumentError, match="record 0 holds float32"):
        column.add(feature_map(x=[0.5]), 0)


def test_rows_do_not_share_a_default() -> None:
    column = FixedColumn("x", FixedLenFeature((2,), "int64", default_value=1), 2)
    column.add(feature_map(), 0)
    column.add(feature_map(), 1)
    rows = column.array()
    rows[0] = 9
    assert rows[1].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("partition", "numbers"),
    [
        (RaggedFeature.RowSplits("k"), [0, 2, 2, 5]),
        (RaggedFeature.RowLengths("k"), [2, 0, 3]),
        (RaggedFeature.RowStarts("k"), [0, 2, 2]),
        (RaggedFeature.RowLimits("k"), [2, 2, 5]),
        (RaggedFeature.ValueRowIds("k"), [0, 0, 2, 2, 2]),
    ],
)
def test_all_kinds_say_the_same(partition: RowPartition, numbers: list[int]) -> None:
    assert row_lengths(partition, np.array(numbers), 5).tolist() == [2, 0, 3]
    assert row_lengths(partition, np.array([], np.int64), 0).tolist() == []
    with pytest.raises(ValueError, match="they "):
        row_lengths(partition, np.array(numbers), 4 if partition.kind != "row_starts" else 1)


def test_rows_of_one_length() -> None:
    assert row_lengths(RaggedFeature.UniformRowLength(2), np.array([]), 6).tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match="they cover 4 values"):
        row_lengths(RaggedFeature.UniformRowLength(2), np.array([]), 5)


@pytest.mark.parametrize(
    ("partition", "numbers", "message"),
    [
        (RaggedFeature.RowSplits("k"), [1, 5], "first must be 0"),
        (RaggedFeature.RowSplits("k"), [0, 6, 5], "must ascend"),
        (RaggedFeature.RowLengths("k"), [-1, 6], "must ascend"),
        (RaggedFeature.ValueRowIds("k"), [1, 0, 0, 0, 0], "must be >= 0 and ascend"),
        (RaggedFeature.ValueRowIds("k"), [0, 0, 0, 0, 2**62], "too many empty ones"),
    ],
)
def test_numbers_that_cut_nothing(partition: RowPartition, numbers: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        row_lengths(partition, np.array(numbers), 5)
