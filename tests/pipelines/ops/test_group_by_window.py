"""Windows of one key, buckets of one length, and resampling by class."""

from __future__ import annotations

from functools import partial
from operator import call
from typing import Any

import numpy as np
import pytest

from raydist.core.errors import SpecError
from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.ops import group_by_window
from raydist.pipelines.ops.group_by_window import KeyedWindowsOp
from raydist.pipelines.ops.rejection_resample import ClassBalance
from tests.contracts.op import collect, iterate, same
from tests.pipelines.storing_executor import InStore, StoringExecutor
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


def test_an_element_that_waits_long_keeps_no_stored_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_by_window, "_MOST_KEPT_BLOCKS", 1)
    loaded: list[int] = []
    load = InStore.load

    def noted(column: InStore) -> Any:
        loaded.append(column.key)
        return load(column)

    monkeypatch.setattr(InStore, "load", noted)
    dataset = sequences(9, *[1] * 400).bucket_by_sequence_length(len, [5], [8, 2])
    found = iterate(dataset, StoringExecutor)
    for _ in range(40):
        next(found)
    first = min(loaded)  # the numbers of the buckets in the first block, which has the only long element
    assert loaded.count(first) == 2, "they are read to group the elements, and to copy the one that waits"
    assert same(collect(found), collect(iterate(dataset))[40:])


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
