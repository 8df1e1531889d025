from __future__ import annotations

import numpy as np

from raydist.dataset import Dataset
from raydist.nest import LEAF, flatten
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.ops.stacked_windows import StackedWindows, is_stacked

PAIRS = StackedWindows(flatten((0, 0))[1], flatten({"a": 0, "b": 0})[1], (1, 0), 2, Dataset)


def test_batches_are_cut_from_a_block_and_know_the_windows_that_they_are_of() -> None:
    block = block_of_rows([(k, np.full(2, k, np.float32)) for k in range(6)])
    made = PAIRS.stacked(block, np.array([0, 3]), np.array([0, 2]))
    assert made is not None
    assert made.specs == (TensorSpec((2, 2), "float32"), TensorSpec((2,), "int64"))
    assert [[element["b"].tolist(), element["a"][:, 0].tolist()] for element in made.rows()] == [
        [[0, 2]] * 2,
        [[3, 5]] * 2,
    ]
    windows = PAIRS.windows_of(made)
    assert (is_stacked(made), is_stacked(windows)) == (True, False)
    assert [[int(x) for x in window[0]] for window in windows.rows()] == [[0, 2], [3, 5]]
    assert [[x.tolist() for x in window[1]] for window in windows.rows()] == [[[0, 0], [2, 2]], [[3, 3], [5, 5]]]


def test_what_cannot_be_cut_is_left_alone() -> None:
    one = StackedWindows(LEAF, LEAF, (0,), 3, Dataset)
    numbers = block_of_rows([1, 2, 3, 4])
    assert one.stacked(numbers, np.array([0]), np.arange(3)) is not None
    assert one.stacked(numbers, np.array([0]), np.arange(2)) is None, "too short to be a batch"
    assert one.stacked(block_of_rows([(1,), (2,), (3,)]), np.array([0]), np.arange(3)) is None
    assert one.stacked(block_of_rows([np.zeros(1), np.zeros(2), np.zeros(3)]), np.array([0]), np.arange(3)) is None
