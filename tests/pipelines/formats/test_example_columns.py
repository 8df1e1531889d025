from __future__ import annotations

from typing import Any

import pytest

from raydist.pipelines.formats.example_columns import RaggedColumn, ScalarColumn, TensorColumn, feature_column
from raydist.pipelines.formats.example_message import example_class
from raydist.pipelines.formats.features import Feature, FixedLenFeature, VarLenFeature
from tests.pipelines.formats.record_files import example


def feature_map(**features: Any) -> Any:
    return example_class().FromString(example(**features)).features.feature


@pytest.mark.parametrize(
    ("feature", "kind"),
    [
        (FixedLenFeature((), "int64"), ScalarColumn),
        (FixedLenFeature((1,), "int64"), TensorColumn),
        (VarLenFeature("int64"), RaggedColumn),
    ],
)
def test_each_feature_has_its_column(feature: Feature, kind: type) -> None:
    column = feature_column("x", feature)
    assert type(column) is kind
    assert len(column.array()) == 0
    for index, value in enumerate([3, 4]):
        column.add(feature_map(x=[value]), index)
    rows = column.array()
    assert [int(row) if kind is ScalarColumn else row.tolist() for row in rows] == (
        [3, 4] if kind is ScalarColumn else [[3], [4]]
    )


def test_rows_do_not_share_a_default() -> None:
    column = feature_column("x", FixedLenFeature((2,), "int64", default_value=1))
    column.add(feature_map(), 0)
    column.add(feature_map(), 1)
    rows = column.array()
    rows[0] = 9
    assert rows[1].tolist() == [1, 1]
