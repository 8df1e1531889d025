from __future__ import annotations

import numpy as np
import pytest

from raydist.pipelines.tf_example.outputs import row_lengths
from raydist.pipelines.tf_example.ragged_features import RaggedFeature, RowPartition


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
