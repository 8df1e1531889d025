"""Functions that write their results to the same memory again and again."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raydist.core.errors import SpecError
from raydist.dataset import Dataset
from raydist.pipelines.elements.block_parts import ReusedResults
from raydist.pipelines.elements.functions import RowCalls
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.elements.spec import TensorSpec


def array() -> Callable[[int], Any]:
    held = np.zeros(3)

    def fn(i: int) -> Any:
        held[:] = i
        return held

    return fn


def large() -> Callable[[int], Any]:
    held = np.zeros(1 << 14)

    def fn(i: int) -> Any:
        held[:] = i
        return held, i

    return fn


def tensor() -> Callable[[int], Any]:
    held = torch.zeros(2)
    return lambda i: held.fill_(int(i))


def dictionary() -> Callable[[int], Any]:
    held: dict[str, int] = {}

    def fn(i: int) -> Any:
        held["x"] = i
        return held

    return fn


def rolling() -> Callable[[int], Any]:
    """It counts its calls: to run it twice would show."""
    held = [0, 0]

    def fn(i: int) -> Any:
        held[:] = held[1], held[1] + 1
        return held

    return fn


@pytest.mark.parametrize("make", [array, large, tensor, dictionary, rolling])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 700])
def test_elements_are_what_was_returned(make: Callable[[], Callable[[int], Any]], num_rows: int) -> None:
    fn = make()
    expected = [block_of_rows([copy.deepcopy(fn(i))]).row(0) for i in range(num_rows)]
    made = list(Dataset.range(num_rows).map(make(), num_parallel_calls=1).as_numpy_iterator())
    np.testing.assert_equal(made, expected)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.sampled_from([None, 0, 1, 3]))
def test_in_whatever_blocks_and_where_a_call_fails(sizes: list[int], failing: int | None) -> None:
    """An error as one of the first two leaves the next block to tell: here the memory is fresh then."""
    held = np.zeros(2)

    def fn(i: int) -> Any:
        if i == failing:
            raise ValueError
        target = held if failing is None else np.zeros(2)
        target[:] = i
        return target

    reused, at = ReusedResults(), 0
    found: list[Any] = []
    for size in sizes:
        calls = RowCalls(fn, block_of_rows(list(range(at, at + size))), at)
        results, failed = reused.begin(calls, size)
        more, more_failed = calls.take(size - len(results))
        wrong = {*failed, *(len(results) + row for row in more_failed)}
        found += [None if row in wrong else float(each[0]) for row, each in enumerate(results + more)]
        at += size
    assert found == [None if i == failing else i for i in range(at)]


def test_results_that_cannot_be_copied_are_told_as_always() -> None:
    lock = threading.Lock()
    dataset = Dataset.range(3).map(lambda i: [lock], num_parallel_calls=1, output_spec=TensorSpec((1,)))
    with pytest.raises(SpecError, match="lock"):
        next(iter(dataset))


def test_a_constant_and_fresh_results_stay_what_they_are() -> None:
    constant = np.ones(2)
    made = list(Dataset.range(4).map(lambda i: (constant, i), num_parallel_calls=1).as_numpy_iterator())
    assert [(each.tolist(), int(i)) for each, i in made] == [([1.0, 1.0], i) for i in range(4)]


@dataclass
class Pair:
    x: Any
    y: Any


def test_parts_of_a_dataclass() -> None:
    held = np.zeros(1)

    def fn(i: int) -> Pair:
        held[:] = i
        return Pair(i, held)

    made = list(Dataset.range(3).map(fn, num_parallel_calls=1).as_numpy_iterator())
    assert [float(pair.y[0]) for pair in made] == [0, 1, 2]


def test_what_was_found_out_travels() -> None:
    reused = ReusedResults()
    block = block_of_rows([1, 2, 3])
    reused.begin(RowCalls(array(), block, 0), 3)
    calls = RowCalls(array(), block, 0)
    assert pickle.loads(pickle.dumps(reused)).begin(calls, 3) == ([], [])
    assert [each.tolist() for each in calls.take(3)[0]] == [[1.0] * 3, [2.0] * 3, [3.0] * 3]
