from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.core.values import INFINITE_CARDINALITY
from raydist.dataset import Dataset
from raydist.pipelines.elements.seeds import RandomKey
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.sources.range import permuted


def order(dataset: Dataset) -> list[int]:
    return [int(x) for x in dataset]


@given(count=st.integers(0, 700), seed=st.integers(0, 50), data=st.data())
def test_every_number_once_whatever_is_asked_for_together(count: int, seed: int, data: st.DataObject) -> None:
    keys = RandomKey(seed, "global_shuffle-1").words(0, 8)
    numbers = permuted(np.arange(count, dtype=np.uint64), count, keys)
    assert sorted(numbers.tolist()) == list(range(count))
    start = data.draw(st.integers(0, count))
    assert np.array_equal(permuted(np.arange(start, count, dtype=np.uint64), count, keys), numbers[start:])


def test_every_number_is_as_likely_at_the_first_place_and_neighbours_are_torn_apart() -> None:
    for count in (7, 64, 100):
        place = np.zeros(1, np.uint64)
        keys = (RandomKey(seed, "test").words(0, 8) for seed in range(40 * count))
        counts = np.bincount([int(permuted(place, count, key)[0]) for key in keys], minlength=count)
        assert 10 < counts.min() <= counts.max() < 90  # 40 expected, standard deviation 6
    numbers = np.array(order(Dataset.range(10_000).global_shuffle(seed=1)))
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(numbers, np.arange(10_000))[0, 1]) < 0.05


def test_the_source_must_have_indices() -> None:
    filtered = Dataset.range(5).filter(lambda x: x > 1)
    with pytest.raises(FailedPreconditionError, match="read by their index, got filter"):
        filtered.global_shuffle()
    with pytest.raises(FailedPreconditionError, match="sample_from_datasets"):
        filtered.sample_by_weight([1] * 5)


_ROWS = Dataset.from_tensor_slices(np.arange(5) * 10)


def test_elements_come_as_often_as_their_weights_say() -> None:
    kinds: list[Any] = [[1, 0, 2, 0, 1], np.array([1e300, 0, 2e300, 0, 1e300]), torch.tensor([1.0, 0, 2, 0, 1])]
    for weights in kinds:
        counts = np.bincount(order(_ROWS.sample_by_weight(weights, 8000, seed=3)), minlength=50)
        assert counts[[10, 30]].tolist() == [0, 0]
        assert np.abs(counts[[0, 20, 40]] / 8000 - [0.25, 0.5, 0.25]).max() < 0.02


def test_draws_without_replacement_have_the_odds_of_draws_one_after_the_other() -> None:
    weights = np.array([5.0, 3.0, 0.0, 2.0, 1.0])
    dataset = _ROWS.sample_by_weight(weights, 2, replacement=False, seed=1)
    pairs = [tuple(order(dataset)) for _ in range(1500)]
    assert all(first != second and 20 not in (first, second) for first, second in pairs)
    share = sum(pair == (0, 10) for pair in pairs) / len(pairs)
    assert abs(share - 5 / 11 * 3 / 6) < 0.04


def test_every_epoch_is_another_draw_and_a_seed_decides_them_all() -> None:
    dataset = _ROWS.sample_by_weight([1] * 5, 20, seed=1)
    epochs = [order(dataset) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = _ROWS.sample_by_weight([1] * 5, 20, seed=1)
    assert epochs == [order(again) for _ in range(3)]
    assert len(dataset) == 20
    assert len(_ROWS.sample_by_weight([1] * 5)) == 5
    with pytest.raises(InvalidArgumentError, match="settings that it was saved with"):
        iter(_ROWS.sample_by_weight([1, 1, 1, 1, 2], 20, seed=1)).load_state_dict(iter(dataset).state_dict())


def test_wrong_arguments_say_what_must_hold() -> None:
    cases: list[tuple[tuple[Any, ...], str]] = [
        (([1, 2],), r"one number for each of the 5 elements, got int64 of shape \(2,\)"),
        ((["a"] * 5,), "one number for each"),
        (([1, 1, -2, 1, 1],), "got -2.0 for element 2"),
        (([1, 1, 1, float("nan"), 1],), "got nan for element 3"),
        (([0] * 5,), "One of the weights must be > 0"),
        (([1] * 5, 0), "num_samples must be >= 1, got 0"),
        (([1] * 5, 2.5), "must be a whole number"),
        (([1, 1, 0, 1, 1], 5, False), "must be <= 4, got 5"),
        (([1] * 5, 5, 1), "replacement must be True or False"),
    ]
    for arguments, message in cases:
        with pytest.raises(InvalidArgumentError, match=message):
            _ROWS.sample_by_weight(*arguments)


RANGES: list[tuple[int, ...]] = [
    *((0,), (5,), (5, 10), (10, 5), (5, 10, 2), (10, 5, -2), (0, 0, -2), (3, 3, 1), (-4, -4, 2), (1, 0, 3), (0, 1, -3))
]


def test_ranges_are_pythons() -> None:
    for args in RANGES:
        dataset = Dataset.range(*args)
        assert order(dataset) == list(range(*args)), args
        assert dataset.cardinality() == len(range(*args)), args
    for wrong, message in (((1, 5, 0), "must not be 0"), ((), "got 0 arguments"), ((1, 2, 3, 4), "got 4 arguments")):
        with pytest.raises(InvalidArgumentError, match=message):
            Dataset.range(*wrong)
    assert Dataset.range(3).element_spec == TensorSpec((), np.int64)
    dataset = Dataset.range(3, output_type="float32")
    assert dataset.element_spec == TensorSpec((), np.float32)
    assert [x.dtype for x in dataset.as_numpy_iterator()] == [np.float32] * 3


def test_counts_from_start_by_step() -> None:
    assert order(Dataset.counter().take(3)) == [0, 1, 2]
    assert order(Dataset.counter(5, -2).take(4)) == [5, 3, 1, -1]
    (batch,) = Dataset.counter(start=1).batch(10_000).take(1)
    assert batch.tolist() == list(range(1, 10_001))
    with pytest.raises(InvalidArgumentError, match="start must be a whole number, got 0.5"):
        Dataset.counter(0.5)  # type: ignore[arg-type]  # the point of this test


def epochs(dataset: Dataset) -> list[list[int]]:
    first = dataset.take(5)
    return [order(first) for _ in range(2)]


def test_one_sequence_in_every_epoch_unless_asked_otherwise() -> None:
    for dataset in (Dataset.random(seed=3), Dataset.random()):
        one, two = epochs(dataset)
        assert one == two
    one, two = epochs(Dataset.random(seed=3, rerandomize_each_iteration=True))
    assert one != two
    assert epochs(Dataset.random(seed=3)) == epochs(Dataset.random(seed=3)) != epochs(Dataset.random(seed=4))


def test_numbers_have_32_bits() -> None:
    (batch,) = Dataset.random(seed=1).batch(10_000).take(1)
    assert 0 <= int(batch.min()) < 1 << 22
    assert (1 << 32) - (1 << 22) < int(batch.max()) < 1 << 32
    assert Dataset.random().cardinality() == INFINITE_CARDINALITY
