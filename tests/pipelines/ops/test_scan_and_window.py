from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from raydist.core.errors import SpecError
from raydist.dataset import Dataset
from raydist.pipelines.elements.spec import DatasetSpec, TensorSpec
from raydist.pipelines.engine import request_size
from tests.contracts.op import collect, iterate
from tests.pipelines.model import recorder


def running(total: Any, x: Any) -> Any:
    return total + x, total + x


def test_the_state_goes_from_element_to_element() -> None:
    fibonacci = Dataset.range(6).scan((0, 1), lambda pair, _: ((pair[1], pair[0] + pair[1]), pair[0]))
    assert [int(x) for x in fibonacci.repeat(2)] == [0, 1, 1, 2, 3, 5] * 2


def test_an_error_leaves_the_state_as_it_was() -> None:
    def careful(total: Any, x: Any) -> Any:
        total += 0 * (6 // int(x - 1)) + x
        return total, total

    def in_place(seen: Any, x: Any) -> Any:
        seen[int(x)] += 1
        return seen, 6 // int(x - 1) * 0 + seen.sum()

    for dataset, expected in (
        (Dataset.range(4).scan(0, careful), [0, "ZeroDivisionError", 2, 5]),
        (Dataset.range(3).scan([0, 0, 0], in_place), [1, "ZeroDivisionError", 2]),
    ):
        assert [item[0] if isinstance(item, tuple) else int(item) for item in collect(iterate(dataset))] == expected


def test_the_function_must_return_a_state_of_one_kind() -> None:
    results: list[Any] = [3, (1,), (1.5, 2), ("text", 2), ((1, 2), 2)]
    for result in results:
        items = collect(iterate(Dataset.range(2).scan(0, lambda total, x, result=result: result)))
        assert [item[0] for item in items] == ["SpecError", "SpecError"], result


def test_resuming_calls_the_function_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("_QUICK_S", "_SLOW_S"):  # after a block that took long the next ones are cut elsewhere
        monkeypatch.setattr(request_size, limit, math.inf)
    calls: list[int] = []
    note = recorder(calls)
    dataset = Dataset.range(5).scan(0, lambda total, x: running(total, note(x)))
    first = iterate(dataset)
    assert [int(x) for x in collect(first, 3)] == [0, 1, 3]
    calls.clear()
    resumed = iterate(dataset)
    resumed.load_state_dict(first.state_dict())
    assert collect(resumed, 1) == [6]
    assert calls == [0, 1, 2, 3]


def test_reduce_gives_the_last_state_and_raises_the_first_error() -> None:
    total = Dataset.range(5).reduce(np.int64(0), lambda total, x: total + x)
    assert isinstance(total, torch.Tensor)
    assert (int(total), total.dtype) == (10, torch.int64)
    count, text = Dataset.zip(Dataset.range(3), Dataset.range(3)).reduce(
        (0, "x"), lambda state, pair: (state[0] + pair[1], state[1] + "y")
    )
    assert (int(count), text) == (3, "xyyy")
    assert int(Dataset.range(0).reduce(7, lambda total, x: total + x)) == 7
    with pytest.raises(ZeroDivisionError):
        Dataset.range(5).map(lambda x: 1 // int(x - 1)).reduce(0, lambda total, x: total + x)
    with pytest.raises(SpecError, match="must keep its structure and dtypes"):
        Dataset.range(5).reduce(0, lambda total, x: total + 0.5)


def lists(dataset: Dataset) -> list[list[int]]:
    return [[int(x) for x in window] for window in dataset]


def test_cardinality_is_exact() -> None:
    for sizes in ((3, 1, 2), (2, 3, 1), (1, 1, 4), (4, 2, 3), (50, 7, 1)):
        for count, drop in itertools.product(range(9), (True, False)):
            windows = Dataset.range(count).window(*sizes, drop)
            assert windows.cardinality() == len(lists(windows)), (sizes, count, drop)


def test_every_leaf_is_a_dataset_that_can_be_read_again() -> None:
    dataset = Dataset.zip({"a": Dataset.range(4), "b": Dataset.range(4).map(str)}).window(3)
    assert dataset.element_spec == {
        "a": DatasetSpec(TensorSpec((), "int64")),
        "b": DatasetSpec(TensorSpec((), "str")),
    }
    first = next(iter(dataset))
    for _ in range(2):
        assert (len(first["a"]), list(first["b"])) == (3, ["0", "1", "2"])
    assert [int(x) for x in first["a"].as_numpy_iterator()] == [0, 1, 2]


def test_windows_that_overlap_share_nothing_that_a_function_writes_to() -> None:
    def add(x: Any) -> Any:
        x += 100
        return x

    ragged = Dataset.range(3).map(lambda i: np.arange(i))
    assert lists(ragged.window(2, 1).flat_map(lambda w: w.map(add))) == [[], [100], [100], [100, 101], [100, 101]]
    dense = Dataset.range(3).map(lambda i: np.full(1, i))
    assert lists(dense.window(2, 1).flat_map(lambda w: w.map(add))) == [[100], [101], [101], [102], [102]]
