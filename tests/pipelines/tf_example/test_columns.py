from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raydist.errors import InvalidArgumentError
from raydist.pipelines.tf_example.columns import FixedColumn, RaggedColumn
from raydist.pipelines.tf_example.features import FixedLenFeature
from raydist.pipelines.tf_example.parse import example_class
from tests.pipelines.formats.record_files import example


def feature_map(**features: Any) -> Any:
    return example_class().FromString(example(**features)).features.feature


def test_a_fixed_column_takes_records_one_by_one_and_many_at_once() -> None:
    for shape, rows in (((), [3, 4, 5]), ((1,), [[3], [4], [5]])):
        column = FixedColumn("x", FixedLenFeature(shape, "int64"), 3)
        column.add(feature_map(x=[4]), 1)
        column.fill(np.array([0, 2]), np.array([[3], [5]]))
        assert column.array().tolist() == rows
        assert [column.accepts(count) for count in (0, 1, 2)] == [False, True, False]


def test_a_ragged_column_takes_any_number() -> None:
    column = RaggedColumn("x", np.dtype(np.int64), 3)
    column.add(feature_map(x=[4, 5]), 1)
    column.fill(np.array([2]), np.array([[6, 7, 8]]))
    assert [row.tolist() for row in column.array()] == [[], [4, 5], [6, 7, 8]]
    assert column.accepts(0)
    with pytest.raises(InvalidArgumentError, match="record 0 holds float32"):
        column.add(feature_map(x=[0.5]), 0)


def test_rows_do_not_share_a_default() -> None:
    column = FixedColumn("x", FixedLenFeature((2,), "int64", default_value=1), 2)
    column.add(feature_map(), 0)
    column.add(feature_map(), 1)
    rows = column.array()
    rows[0] = 9
    assert rows[1].tolist() == [1, 1]
