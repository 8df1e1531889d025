from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.core.values import UNKNOWN_CARDINALITY
from raydist.dataset import Dataset
from raydist.pipelines.elements.spec import TensorSpec
from tests.contracts.op import collect, iterate


def batched(key: Any, window: Dataset) -> Dataset:
    return window.batch(100)


def test_sizes_by_key() -> None:
    dataset = Dataset.range(9).group_by_window(lambda x: x % 2, batched, window_size_func=lambda key: key + 2)
    assert [x.tolist() for x in dataset] == [[0, 2], [1, 3, 5], [4, 6], [8], [7]]


def test_what_is_left_comes_by_ascending_key() -> None:
    dataset = Dataset.range(4, -1, -1).group_by_window(lambda x: x, batched, window_size=3)
    assert [x.tolist() for x in dataset] == [[0], [1], [2], [3], [4]]


def test_the_reducer_gets_key_and_whole_elements() -> None:
    pairs = Dataset.range(6).map(lambda x: (x % 2, {"x": x}))
    dataset = pairs.group_by_window(
        lambda key, rest: key, lambda key, window: window.map(lambda k, rest: (key, rest["x"])).shuffle(9, seed=1), 3
    )
    got = [(int(key), int(x)) for key, x in dataset]
    assert [key for key, _ in got] == [0, 0, 0, 1, 1, 1]
    assert [sorted(x for _, x in part) for part in (got[:3], got[3:])] == [[0, 2, 4], [1, 3, 5]]


def test_an_endless_input_and_an_empty_one() -> None:
    endless = Dataset.counter().group_by_window(lambda x: x % 3, batched, window_size=2).take(4)
    assert [x.tolist() for x in endless] == [[0, 3], [1, 4], [2, 5], [6, 9]]
    assert list(Dataset.range(0).group_by_window(lambda x: x, batched, window_size=2)) == []


def test_spec_and_cardinality() -> None:
    spec = TensorSpec((None,), np.int64)
    ragged = Dataset.range(3).map(np.arange, output_spec=spec)
    dataset = ragged.group_by_window(lambda x: 0, lambda key, window: window.padded_batch(2), window_size=10**9)
    assert dataset.element_spec == TensorSpec((None, None), np.int64)
    assert dataset.cardinality() == UNKNOWN_CARDINALITY


def test_a_reducer_that_fails() -> None:
    def reduce(key: Any, window: Dataset) -> Any:
        return window.batch(2) if key else 7 // int(key)

    items = collect(iterate(Dataset.range(4).group_by_window(lambda x: x % 2, reduce, window_size=2)))
    assert items[0][0] == "ZeroDivisionError"
    assert items[1].tolist() == [1, 3]
    assert len(items) == 2


def test_bad_functions() -> None:
    no_dataset: Any = lambda key, window: 5  # noqa: E731 - typed, because its result is wrong
    with pytest.raises(SpecError, match="must return a Dataset, got 5"):
        next(iter(Dataset.range(4).group_by_window(lambda x: x, no_dataset, window_size=2)))
    nothing: Any = None
    with pytest.raises(InvalidArgumentError, match="reduce_func must be a function"):
        Dataset.range(4).group_by_window(lambda x: x, nothing, window_size=2)
    with pytest.raises(InvalidArgumentError, match="key_func must be a function"):
        Dataset.range(4).group_by_window(nothing, batched, window_size=2)
