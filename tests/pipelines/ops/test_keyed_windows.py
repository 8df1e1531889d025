from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.dataset import Dataset
from raydist.pipelines.elements.spec import DatasetSpec, TensorSpec
from raydist.pipelines.ops.group_by_window import KeyedWindowsOp
from tests.contracts.op import collect, iterate


def windows(dataset: Dataset, key: Any, size: int | None, size_func: Any = None) -> list[Any]:
    """(key, elements) of each window; an error as its name."""
    pairs = collect(iterate(Dataset(KeyedWindowsOp(dataset._op, key, size, size_func, Dataset))))
    return [pair[0] if isinstance(pair[0], str) else (int(pair[0]), [int(x) for x in pair[1]]) for pair in pairs]


def test_full_windows_come_at_once_and_the_rest_by_key() -> None:
    assert windows(Dataset.range(7), lambda x: -x % 3, 2) == [
        *((0, [0, 3]), (2, [1, 4]), (1, [2, 5])),
        (0, [6]),
    ]
    assert windows(Dataset.range(5).map(lambda x: 4 - x), lambda x: x, 9) == [(k, [k]) for k in range(5)]


@pytest.mark.parametrize("rows", [1, 2, 5, 100])
def test_the_size_of_blocks_changes_nothing(rows: int) -> None:
    source = Dataset.range(60).batch(rows).unbatch()
    assert windows(source, lambda x: x * x % 7, 5) == windows(Dataset.range(60), lambda x: x * x % 7, 5)


def test_errors_take_the_place_of_elements() -> None:
    bad_keys: list[Any] = [0, 1.5, True, np.int32(3), np.zeros(1, np.int64), 5]
    got = windows(Dataset.range(6), lambda x: bad_keys[x], 1)
    assert got == [(0, [0]), *["SpecError"] * 4, (5, [5])]
    sizes = {0: 0, 1: 2, 2: 1.5, 3: 1}
    got = windows(Dataset.range(4), lambda x: x, None, lambda key: sizes[int(key)])
    assert got == ["InvalidArgumentError", "SpecError", (3, [3]), (1, [1])]


def test_a_key_function_that_fails_is_named() -> None:
    dataset = Dataset(KeyedWindowsOp(Dataset.range(3)._op, lambda x: 1 // int(x - 1), 1, None, Dataset))
    with pytest.raises(ZeroDivisionError) as caught:
        collect_raising(dataset)
    assert any("keyed_windows-1 (test_keyed_windows.py" in note for note in caught.value.__notes__)
    assert any("element 1 of its input" in note for note in caught.value.__notes__)


def collect_raising(dataset: Dataset) -> None:
    for _ in dataset.as_numpy_iterator():
        pass


def test_spec() -> None:
    op = KeyedWindowsOp(Dataset.range(3)._op, lambda x: x, 1, None, Dataset)
    assert op.element_spec() == (TensorSpec((), "int64"), DatasetSpec(TensorSpec((), "int64")))


@pytest.mark.parametrize(("size", "size_func"), [(None, None), (3, lambda key: 3), (0, None), (None, 3)])
def test_bad_sizes(size: int | None, size_func: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="window_size"):
        KeyedWindowsOp(Dataset.range(3)._op, lambda x: x, size, size_func, Dataset)
