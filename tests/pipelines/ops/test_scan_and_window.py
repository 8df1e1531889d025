"""States that go from element to element, windows, and other datasets as elements."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from functools import partial
from operator import call
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raydist.core.errors import FailedPreconditionError, SpecError
from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.elements.spec import DatasetSpec, TensorSpec
from raydist.strategies.one_device import OneDeviceStrategy
from tests.pipelines.tables import outline
from tests.refused import check_refused


def test_an_error_leaves_the_state_as_it_was() -> None:
    def careful(total: Any, x: Any) -> Any:
        total += 0 * (6 // int(x - 1)) + x
        return total, total

    def in_place(seen: Any, x: Any) -> Any:
        seen[int(x)] += 1
        return seen, 6 // int(x - 1) * 0 + seen.sum()

    assert outline(Dataset.range(4).scan(0, careful)) == [0, "ZeroDivisionError", 2, 5]
    assert outline(Dataset.range(3).scan([0, 0, 0], in_place)) == [1, "ZeroDivisionError", 2]


def test_the_function_must_return_a_state_of_one_kind() -> None:
    results: list[Any] = [3, (1,), (1.5, 2), ("text", 2), ((1, 2), 2)]
    for result in results:
        dataset = Dataset.range(2).scan(0, lambda total, x, result=result: result)
        assert outline(dataset) == ["SpecError", "SpecError"], result


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


def lists(dataset: Any) -> list[list[Any]]:
    return [[x.tolist() for x in element] for element in dataset]


def shuffled(x: Any) -> Dataset:
    return Dataset.range(20).shuffle(20)


def is_odd(x: Any) -> bool:
    return bool(x % 2)


def test_map_takes_transforms_and_returns_datasets() -> None:
    windows = Dataset.range(5).window(2)
    assert lists(windows.map(lambda w: w.batch(2))) == [[[0, 1]], [[2, 3]], [[4]]]
    assert lists(windows.map(lambda w: w).map(lambda w: w.map(lambda x: x + 1))) == [[1, 2], [3, 4], [5]]
    negative = windows.map(lambda w: w.map(np.negative)).flat_map(lambda w: w)
    assert [int(x) for x in negative] == [0, -1, -2, -3, -4]
    pairs = Dataset.zip(Dataset.range(4), Dataset.range(4, 8)).window(2)
    sums = pairs.map(lambda a, b: Dataset.zip(a, b).map(lambda x, y: x + y))
    assert lists(sums) == [[4, 6], [8, 10]]


def test_a_dataset_may_be_a_part_of_a_structure() -> None:
    dataset = (
        Dataset.range(3).map(lambda n: {"rows": Dataset.range(n), "count": n}).shuffle(1).cache().repeat(1).take(3)
    )
    assert [([int(x) for x in element["rows"]], int(element["count"])) for element in dataset] == [
        *(([], 0), ([0], 1), ([0, 1], 2))
    ]
    assert lists(Dataset.from_tensors(Dataset.range(2)).repeat(2)) == [[0, 1], [0, 1]]


def test_its_spec_is_asked_of_the_first_dataset() -> None:
    dataset = Dataset.range(4).map(lambda n: (n, Dataset.from_tensors(np.zeros((2, n)))))
    assert dataset.element_spec == (TensorSpec((), "int64"), DatasetSpec(TensorSpec((2, None), "float64")))
    flat = dataset.map(lambda n, d: d).flat_map(lambda d: d)
    assert flat.element_spec == TensorSpec((2, None), "float64")
    assert [x.shape for x in flat] == [(2, n) for n in range(4)]
    nothing = Dataset.range(2).map(lambda n: Dataset.range(0).map(abs))
    assert nothing.element_spec == DatasetSpec()
    assert lists(nothing) == [[], []]
    with pytest.raises(FailedPreconditionError, match="gave no dataset with a first element"):
        _ = nothing.flat_map(lambda d: d).element_spec


def test_random_choices_follow_from_seed_epoch_and_element() -> None:
    def build(calls: int | None = None) -> Dataset:
        dataset = Dataset.range(30).filter(is_odd).map(shuffled, num_parallel_calls=calls)
        return dataset.with_options(Options(seed=3))

    plain = build()
    epochs = [lists(plain), lists(plain)]
    assert len({tuple(order) for order in epochs[0] + epochs[1]}) == 30
    assert all(sorted(order) == list(range(20)) for order in epochs[0])
    for calls in (1, 2):
        dataset = build(calls)
        assert [lists(dataset), lists(dataset)] == epochs, f"num_parallel_calls={calls}"
    assert lists(pickle.loads(pickle.dumps(plain))) == epochs[0]
    assert lists(plain.with_options(Options(seed=4))) not in epochs


def test_one_dataset_for_all_elements_is_a_dataset_of_each() -> None:
    shared = Dataset.range(9).shuffle(9)
    orders = lists(Dataset.range(3).map(lambda x: shared).with_options(Options(seed=1)))
    assert len({tuple(order) for order in orders}) == 3


def test_what_needs_tensors_refuses_datasets(tmp_path: Path) -> None:
    datasets = Dataset.range(4).window(2), Dataset.range(2).map(lambda n: (n, Dataset.range(n)))
    uses: list[Callable[[Dataset], object]] = [
        *(lambda ds: next(iter(ds.batch(2))), lambda ds: next(iter(ds.padded_batch(2)))),
        lambda ds: next(iter(ds.map_batches(lambda *x: x, 2))),
        lambda ds: ds.batch(2).element_spec,
        lambda ds: ds.save(str(tmp_path / "saved")),
        lambda ds: list(ds.cache(str(tmp_path / "cache"))),
        lambda ds: next(iter(OneDeviceStrategy("cpu").distribute_dataset(ds))),
    ]
    message = "must be tensors, got datasets"
    check_refused(call, [(partial(use, dataset), message) for use in uses for dataset in datasets], SpecError)
    lists_of_datasets = Dataset.range(1).map(lambda n: [Dataset.range(n)])
    check_refused(call, [(lambda: next(iter(lists_of_datasets)), "A leaf must be")], SpecError)


def test_a_declared_dataset_is_not_asked() -> None:
    declared = DatasetSpec(TensorSpec((), "int64"))
    dataset = Dataset.range(3).map(lambda n: Dataset.range(n), output_spec=declared)
    assert dataset.element_spec == declared
    assert lists(dataset) == [[], [0], [0, 1]]
    with pytest.raises(SpecError, match="must return DatasetSpec"):
        next(iter(Dataset.range(3).map(lambda n: n, output_spec=declared)))
