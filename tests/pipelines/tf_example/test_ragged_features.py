from __future__ import annotations

from collections.abc import Callable

import pytest

import raydist as rd
from raydist.pipelines.tf_example.ragged_features import RaggedFeature


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RaggedFeature("int8"), "must be int64, float32 or bytes"),
        (lambda: RaggedFeature("int64", row_splits_dtype="uint8"), "must be int32 or int64, got 'uint8'"),
        (lambda: RaggedFeature("int64", partitions=["lengths"]), r"made by RaggedFeature.RowSplits.*got \['lengths'\]"),  # type: ignore[list-item]
        (lambda: RaggedFeature.UniformRowLength(0), "length >= 1, got 0"),
    ],
)
def test_bad_arguments(make: Callable[[], object], message: str) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=message):
        make()
