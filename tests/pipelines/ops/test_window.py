from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.core.values import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from raydist.dataset import Dataset
from raydist.pipelines.elements.spec import DatasetSpec, TensorSpec
from tests.contracts.op import collect, iterate


def lists(dataset: Dataset) -> list[list[int]]:
    return [[int(x) for x in window] for window in dataset]


def test_size_shift_and_stride() -> None:
    assert lists(Dataset.range(7).window(3, 1, 2)) == [*([0, 2, 4], [1, 3, 5], [2, 4, 6], [3, 5], [4, 6], [5], [6])]
    assert lists(Dataset.range(7).window(2, 3)) == [[0, 1], [3, 4], [6]]
    assert lists(Dataset.range(7).window(3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert lists(Dataset.range(7).window(3, 1, 2, drop_remainder=True)) == [[0, 2, 4], [1, 3, 5], [2, 4, 6]]
    assert lists(Dataset.range(0).window(3)) == []


@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize(("size", "shift", "stride"), [(3, 1, 2), (2, 3, 1), (1, 1, 4), (4, 2, 3), (50, 7, 1)])
def test_cardinality_is_exact(size: int, shift: int, stride: int, drop: bool) -> None:
    for count in range(9):
        windows = Dataset.range(count).window(size, shift, stride, drop)
        expected = [list(range(count))[at : at + (size - 1) * stride + 1 : stride] for at in range(0, count, shift)]
        expected = [window for window in expected if len(window) == size or not drop]
        assert lists(windows) == expected
        assert windows.cardinality() == len(expected)


def test_cardinality_of_other_inputs() -> None:
    assert Dataset.range(3).repeat().window(2).cardinality() == INFINITE_CARDINALITY
    assert Dataset.range(3).filter(lambda x: True).window(2).cardinality() == UNKNOWN_CARDINALITY


def test_every_leaf_is_a_dataset() -> None:
    dataset = Dataset.zip({"a": Dataset.range(4), "b": Dataset.range(4).map(str)}).window(3)
    assert dataset.element_spec == {
        "a": DatasetSpec(TensorSpec((), "int64")),
        "b": DatasetSpec(TensorSpec((), "str")),
    }
    first = next(iter(dataset))
    assert (len(first["a"]), list(first["b"])) == (3, ["0", "1", "2"])


def test_a_window_can_be_read_again() -> None:
    (window,) = Dataset.range(3).window(3)
    assert [int(x) for x in window] == [int(x) for x in window.as_numpy_iterator()] == [0, 1, 2]


def test_windows_that_overlap_share_nothing_that_a_function_writes_to() -> None:
    def add(x: Any) -> Any:
        x += 100
        return x

    ragged = Dataset.range(3).map(lambda i: np.arange(i))
    assert lists(ragged.window(2, 1).flat_map(lambda w: w.map(add))) == [[], [100], [100], [100, 101], [100, 101]]
    dense = Dataset.range(3).map(lambda i: np.full(1, i))
    assert lists(dense.window(2, 1).flat_map(lambda w: w.map(add))) == [[100], [101], [101], [102], [102]]


def test_an_error_spoils_the_windows_that_hold_it() -> None:
    dataset = Dataset.range(5).map(lambda x: 4 // int(x - 2)).window(2, 1).flat_map(lambda w: w.batch(2))
    items = collect(iterate(dataset))
    assert [item[0] if isinstance(item, tuple) else item.tolist() for item in items] == [
        *([-2, -4], "ZeroDivisionError", "ZeroDivisionError", [4, 2], [2])
    ]


def test_windows_travel_through_a_prefetch() -> None:
    assert lists(Dataset.range(5).window(2).prefetch(2)) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("arguments", [(0,), (-1,), (2, 0), (2, 1, 0)])
def test_bad_arguments(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="must be >= 1, got"):
        Dataset.range(3).window(*arguments)
