"""Windows that are only batched: what comes out is what comes out without the rewrite, wherever one stops."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.dataset import Dataset
from raydist.options import OptimizationOptions, Options
from tests.contracts.op import collect, iterate, same
from tests.pipelines.optimize.rewriting import assert_same, optimised_names, rewrites_of

FLAG = "window_stacking"
SIZE = 4


def pairs(count: int) -> Dataset:
    return Dataset.zip(Dataset.range(count), Dataset.range(count).map(lambda x: np.full((2, 3), x, np.float32)))


def uneven(x: np.int64) -> Any:
    return np.zeros(int(x) // 8)


def spoiled(x: np.int64) -> Any:
    return 1 // (int(x) - 9)


STACKED: dict[str, Callable[[], Dataset]] = {
    "numbers": lambda: Dataset.range(30).window(4, shift=1).flat_map(lambda w: w.batch(4)),
    "whole windows": lambda: Dataset.range(30).window(4, 3, 2, True).flat_map(lambda w: w.batch(SIZE)),
    "whole batches": lambda: Dataset.range(30).window(4, 3).flat_map(lambda w: w.batch(4, drop_remainder=True)),
    "longer batches": lambda: Dataset.range(30).window(4, 6, 3).flat_map(lambda w: w.batch(9)),
    "no batch": lambda: Dataset.range(30).window(4).flat_map(lambda w: w.batch(9, drop_remainder=True)),
    "pairs": lambda: pairs(20).window(3, 1).flat_map(lambda x, y: Dataset.zip(x.batch(3), y.batch(3))),
    "swapped": lambda: pairs(20).window(3, 1).flat_map(lambda x, y: Dataset.zip(y, x).batch(3)),
    "text": lambda: Dataset.from_tensor_slices(list("abcdefghij")).window(3, 2).flat_map(lambda w: w.batch(3)),
    "errors": lambda: Dataset.range(30).map(spoiled).window(3, 2).flat_map(lambda w: w.batch(3)),
    "several shapes": lambda: Dataset.range(30).map(uneven).window(3, 2).flat_map(lambda w: w.batch(3)),
    "repeated": lambda: Dataset.range(40).shuffle(9, seed=1).window(4, 1).flat_map(lambda w: w.batch(4)).repeat(2),
    "tuples of one": lambda: Dataset.from_tensor_slices((np.arange(9),)).window(3).flat_map(lambda w: w.batch(3)),
    "not what it gets": lambda: pairs(9).window(3).flat_map(lambda w: w.batch(3)),
}


@pytest.mark.parametrize("make", STACKED.values(), ids=STACKED)
def test_nothing_changes(make: Callable[[], Dataset]) -> None:
    assert FLAG in rewrites_of(make())
    assert_same(make(), FLAG)
    assert_same(make().map(lambda *element: element), FLAG)


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("name", ["numbers", "pairs", "errors", "several shapes", "repeated", "whole batches"])
def test_states_fit_with_and_without(name: str, saves: bool) -> None:
    def opened(stacking: bool) -> Any:
        options = Options(optimization=OptimizationOptions(window_stacking=stacking))
        return iterate(STACKED[name]().with_options(options))

    expected = collect(opened(saves), 200)
    first, seen = opened(saves), 0
    while True:
        second = opened(not saves)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        rest = collect(second, 200)
        assert same(rest, expected[seen:]), f"resumed after {seen}"
        if not collect(first, 1):
            break
        seen += 1
    assert seen == len(expected)


@settings(max_examples=40)
@given(st.integers(0, 12), st.integers(1, 5), st.integers(1, 5), st.integers(1, 3), st.booleans(), st.booleans())
def test_any_windows(count: int, size: int, shift: int, stride: int, whole: bool, drop: bool) -> None:
    windows = Dataset.range(count).window(size, shift, stride, whole)
    assert_same(windows.flat_map(lambda w: w.batch(size, drop)), FLAG)


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.range(9).window(3).flat_map(lambda w: w.batch(2)),
        Dataset.range(9).window(3).flat_map(lambda w: w),
        Dataset.range(9).window(3).flat_map(lambda w: w.batch(3).batch(1)),
        Dataset.range(9).window(3).flat_map(lambda w: w.batch(w.cardinality())),
        Dataset.range(9).window(3).interleave(lambda w: w.batch(3)),
        Dataset.range(9).batch(3).flat_map(lambda w: Dataset.from_tensors(w)),
        pairs(9).window(3).flat_map(lambda x, y: x.batch(3)),
        pairs(9).window(3).flat_map(lambda x, y: Dataset.zip(x.batch(3), x.batch(3))),
        pairs(9).window(3).flat_map(lambda x, y: Dataset.zip(x.batch(3), y.batch(4))),
        pairs(9).window(3).flat_map(lambda x, y: Dataset.zip(x.batch(3), y)),
    ],
)
def test_all_else_is_left_alone(dataset: Dataset) -> None:
    assert FLAG not in rewrites_of(dataset)


def test_names_stay() -> None:
    dataset = STACKED["numbers"]()
    assert (
        optimised_names(dataset) == optimised_names(dataset, window_stacking=False) == ["range", "window", "flat_map"]
    )


def test_elements_are_private() -> None:
    for batch in STACKED["numbers"]().as_numpy_iterator():
        batch += 100
    assert [batch[0] for batch in STACKED["numbers"]().as_numpy_iterator()] == list(range(30))
