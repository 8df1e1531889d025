"""Windows of one key, buckets of one length, and resampling by class."""

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
from raydist.pipelines.ops.group_by_window import KeyedWindowsOp
from raydist.pipelines.ops.rejection_resample import ClassBalance
from raydist.strategies.one_device import OneDeviceStrategy
from tests.contracts.op import collect, iterate
from tests.pipelines.tables import outline
from tests.refused import check_refused


def batched(key: Any, window: Dataset) -> Dataset:
    return window.batch(100)


def test_what_is_left_comes_by_ascending_key() -> None:
    dataset = Dataset.range(4, -1, -1).group_by_window(lambda x: x, batched, window_size=3)
    assert [x.tolist() for x in dataset] == [[0], [1], [2], [3], [4]]
    endless = Dataset.counter().group_by_window(lambda x: x % 3, batched, window_size=2).take(4)
    assert [x.tolist() for x in endless] == [[0, 3], [1, 4], [2, 5], [6, 9]]
    assert list(Dataset.range(0).group_by_window(lambda x: x, batched, window_size=2)) == []


def test_the_reducer_gets_key_and_whole_elements() -> None:
    pairs = Dataset.range(6).map(lambda x: (x % 2, {"x": x}))
    dataset = pairs.group_by_window(
        lambda key, rest: key, lambda key, window: window.map(lambda k, rest: (key, rest["x"])).shuffle(9, seed=1), 3
    )
    got = [(int(key), int(x)) for key, x in dataset]
    assert [key for key, _ in got] == [0, 0, 0, 1, 1, 1]
    assert [sorted(x for _, x in part) for part in (got[:3], got[3:])] == [[0, 2, 4], [1, 3, 5]]


def test_a_reducer_that_fails() -> None:
    def reduce(key: Any, window: Dataset) -> Any:
        return window.batch(2) if key else 7 // int(key)

    items = collect(iterate(Dataset.range(4).group_by_window(lambda x: x % 2, reduce, window_size=2)))
    assert items[0][0] == "ZeroDivisionError"
    assert items[1].tolist() == [1, 3]
    assert len(items) == 2
    no_dataset: Any = lambda key, window: 5  # noqa: E731 - typed, because its result is wrong
    with pytest.raises(SpecError, match="must return a Dataset, got 5"):
        next(iter(Dataset.range(4).group_by_window(lambda x: x, no_dataset, window_size=2)))


def windows(dataset: Dataset, key: Any, size: int | None, size_func: Any = None) -> list[Any]:
    """(key, elements) of each window; an error as its name."""
    pairs = collect(iterate(Dataset(KeyedWindowsOp(dataset._op, key, size, size_func, Dataset))))
    return [pair[0] if isinstance(pair[0], str) else (int(pair[0]), [int(x) for x in pair[1]]) for pair in pairs]


def test_errors_take_the_place_of_elements() -> None:
    bad_keys: list[Any] = [0, 1.5, True, np.int32(3), np.zeros(1, np.int64), 5]
    got = windows(Dataset.range(6), lambda x: bad_keys[x], 1)
    assert got == [(0, [0]), *["SpecError"] * 4, (5, [5])]
    sizes = {0: 0, 1: 2, 2: 1.5, 3: 1}
    got = windows(Dataset.range(4), lambda x: x, None, lambda key: sizes[int(key)])
    assert got == ["InvalidArgumentError", "SpecError", (3, [3]), (1, [1])]


def sequences(*lengths: int) -> Dataset:
    ints = TensorSpec((None,), np.int64)
    return Dataset.from_tensor_slices(list(lengths)).map(lambda n: np.full(n, n), output_spec=ints)


def shapes(dataset: Dataset) -> list[tuple[int, ...]]:
    return [tuple(batch.shape) for batch in dataset]


def test_padding() -> None:
    dataset = sequences(1, 5, 2, 9, 3, 1).bucket_by_sequence_length(len, [3, 6], [2, 2, 2])
    assert [batch.tolist() for batch in dataset] == [
        *([[1, 0], [2, 2]], [[5, 5, 5, 5, 5], [3, 3, 3, 0, 0]], [[1]], [[9] * 9])
    ]
    to_boundary = sequences(1, 4, 2, 3).bucket_by_sequence_length(
        len, [3, 6], [2, 2, 2], padding_values=-1, pad_to_bucket_boundary=True
    )
    assert [batch.tolist() for batch in to_boundary] == [[[1, -1], [2, 2]], [[4, 4, 4, 4, -1], [3, 3, 3, -1, -1]]]
    rows = Dataset.from_tensor_slices([2, 1]).map(lambda n: (np.zeros((n, 2)), n))
    unknown = rows.bucket_by_sequence_length(
        lambda x, n: n, [4], [2, 2], padded_shapes=([None, 3], []), pad_to_bucket_boundary=True
    )
    assert [tuple(x.shape) for x, _ in unknown] == [(2, 3, 3)]


def test_a_length_that_was_only_found_on_the_first_elements_pads_nothing() -> None:
    def items(*lengths: int) -> list[Any]:
        dataset = Dataset.from_tensor_slices(list(lengths)).map(lambda n: np.full(n, n))
        return collect(iterate(dataset.bucket_by_sequence_length(len, [4], [1, 1], pad_to_bucket_boundary=True)))

    same_at_first = items(1, 1, 1, 2)
    assert same_at_first[0].tolist() == [[1]]
    assert same_at_first[3][0] == "SpecError"
    assert "Declare output_spec=" in same_at_first[3][1]
    assert [item.tolist() for item in items(1, 2)] == [[[1, 0, 0]], [[2, 2, 0]]]


def test_wrong_lengths() -> None:
    dataset = sequences(1, 7, 2).bucket_by_sequence_length(len, [3], [2, 2], pad_to_bucket_boundary=True)
    items = collect(iterate(dataset))
    assert items[0][0] == "InvalidArgumentError"
    assert "shorter than the last boundary, 3, got length 7" in items[0][1]
    assert items[1].tolist() == [[1, 0], [2, 2]]
    items = collect(iterate(sequences(1).bucket_by_sequence_length(lambda x: 1.5, [2], [1, 1])))
    assert [item[0] for item in items] == ["SpecError"]


def test_remainders_and_no_padding() -> None:
    source = sequences(1, 1, 4, 4, 1)
    assert shapes(source.bucket_by_sequence_length(len, [2], [2, 3], drop_remainder=True)) == [(2, 1)]
    assert shapes(source.bucket_by_sequence_length(len, [2], [2, 3], no_padding=True)) == [(2, 1), (1, 1), (2, 4)]
    items = collect(iterate(sequences(1, 2).bucket_by_sequence_length(len, [9], [2, 1], no_padding=True)))
    assert [item[0] for item in items] == ["SpecError"]


def rare(x: Any) -> int:
    return int(x % 10 == 0)


def counts(dataset: Dataset) -> list[int]:
    found = [int(kind) for kind, _ in dataset]
    return [found.count(kind) for kind in (0, 1)]


def test_a_known_or_estimated_distribution_becomes_the_target() -> None:
    for initial, most in (([0.9, 0.1], 360), (None, 400)):
        common, rarely = counts(Dataset.range(3000).rejection_resample(rare, [0.5, 0.5], initial, seed=1))
        assert rarely == 300  # all of them: no choice could keep more
        assert 240 < common < most


def test_every_element_once_at_most_in_order_with_its_class() -> None:
    source = Dataset.range(500).map(lambda x: {"x": x})
    pairs = list(
        source.rejection_resample(lambda row: np.int32(rare(row["x"])), [0.7, 0.3], seed=2).as_numpy_iterator()
    )
    numbers = [int(row["x"]) for _, row in pairs]
    assert numbers == sorted(set(numbers))
    assert all(kind == rare(x) and kind.dtype == np.int32 for (kind, _), x in zip(pairs, numbers, strict=True))


def test_epochs_differ_and_seeds_repeat() -> None:
    def epochs(seed: int | None) -> list[list[int]]:
        dataset = Dataset.range(300).rejection_resample(rare, [0.5, 0.5], [0.9, 0.1], seed=seed)
        return [[int(x) for _, x in dataset.with_options(Options(seed=5)).repeat(2)] for _ in range(2)]

    first, second = epochs(3)
    assert first == second == epochs(3)[0]
    assert first != epochs(4)[0]
    middle = first.index(min(first[1:]))
    assert first[:middle] != first[middle:]


def test_errors_of_classes_take_the_place_of_elements() -> None:
    answers: list[Any] = [0, 2, -1, 1.5, 0, "a", [0]]
    items = collect(iterate(Dataset.range(8).rejection_resample(lambda x: answers[x], [0.5, 0.5], [1.0, 1.0])))
    names = [item[0] if isinstance(item[0], str) else int(item[0]) for item in items]
    assert names == [0, *["InvalidArgumentError"] * 2, "SpecError", 0, "SpecError", "SpecError", "IndexError"]
    assert "A class must be in 0 .. 1, got 2." in items[1][1]
    resampled = Dataset.range(6000).rejection_resample(lambda x: int(x % 3), [0.5, 0.5], [0.5, 0.5], seed=1)
    kept = [int(x) for _, x in resampled.ignore_errors(log_warning=False)]
    assert kept == [x for x in range(6000) if x % 3 < 2], "however many are of no class, each is an error of its own"


def test_bad_distributions() -> None:
    table: list[tuple[Any, Any, str]] = [
        (0.5, None, "target_dist must be a list of weights"),
        ([], None, "target_dist must be a list of weights"),
        (["a"], None, "target_dist must be a list of weights"),
        ([[1.0]], None, "target_dist must be a list of weights"),
        ([0.5, -0.5], None, "weights >= 0, not all of them 0"),
        ([0.0, 0.0], None, "weights >= 0, not all of them 0"),
        ([1.0, float("nan")], None, "weights >= 0, not all of them 0"),
        ([0.5, 0.5], [1.0], "got 2 and 1 entries"),
        ([0.5, 0.5], [1.0, 0.0], "got 0 for class 1, which is wanted"),
    ]
    check_refused(
        call,
        [(partial(ClassBalance.of, target, initial), message) for target, initial, message in table],
    )


# --- states that go from element to element, windows, and other datasets as elements ----------------------------------


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
