from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.dataset import Dataset
from raydist.pipelines.elements.seeds import RandomKey
from raydist.pipelines.sources.random_indices import DrawsOp, permuted


def test_zero_weights_are_never_drawn() -> None:
    draws = Dataset(DrawsOp.of([0, 3, 0, 1, 0], 5, seed=1, rerandomize=False))
    (batch,) = draws.batch(9000).take(1).as_numpy_iterator()
    counts = np.bincount(batch, minlength=5)
    assert counts[[0, 2, 4]].tolist() == [0, 0, 0]
    assert 2.6 < counts[1] / counts[3] < 3.4


def test_weights_must_fit_the_datasets() -> None:
    with pytest.raises(InvalidArgumentError, match="one number per dataset, got 1 for 2"):
        DrawsOp.of([1.0], 2, seed=None, rerandomize=False)


def order(dataset: Dataset) -> list[int]:
    return [int(x) for x in dataset]


@given(count=st.integers(0, 700), seed=st.integers(0, 50))
def test_every_number_once(count: int, seed: int) -> None:
    keys = RandomKey(seed, "global_shuffle-1").words(0, 8)
    numbers = permuted(np.arange(count, dtype=np.uint64), count, keys)
    assert sorted(numbers.tolist()) == list(range(count))


def test_numbers_do_not_depend_on_what_is_asked_for_together() -> None:
    keys = RandomKey(3, "global_shuffle-1").words(0, 8)
    whole = permuted(np.arange(1000, dtype=np.uint64), 1000, keys)
    assert np.array_equal(permuted(np.arange(400, 410, dtype=np.uint64), 1000, keys), whole[400:410])


@pytest.mark.parametrize("count", [7, 64, 100])
def test_every_number_is_as_likely_at_the_first_place(count: int) -> None:
    trials = 40 * count
    places = np.zeros(count, np.uint64)
    firsts = [int(permuted(places[:1], count, RandomKey(s, "test").words(0, 8))[0]) for s in range(trials)]
    counts = np.bincount(firsts, minlength=count)
    assert 10 < counts.min() <= counts.max() < 90  # 40 expected, standard deviation 6


def test_neighbours_are_torn_apart() -> None:
    numbers = np.array(order(Dataset.range(10_000).global_shuffle(seed=1)))
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(numbers, np.arange(10_000))[0, 1]) < 0.05


def test_seeds_and_epochs() -> None:
    shuffled = Dataset.range(50).global_shuffle(seed=1)
    first, second = order(shuffled), order(shuffled)
    assert first != second
    assert order(Dataset.range(50).global_shuffle(seed=1)) == first
    frozen = Dataset.range(50).global_shuffle(reshuffle_each_iteration=False)
    assert order(frozen) == order(frozen)
    assert order(shuffled.repeat(2))[:50] != order(shuffled.repeat(2))[50:]


def test_rows_are_read_where_they_lie() -> None:
    rows = Dataset.from_tensor_slices({"x": np.arange(20).reshape(10, 2)}).global_shuffle(seed=1)
    assert sorted(row["x"].tolist() for row in rows) == np.arange(20).reshape(10, 2).tolist()
    assert (rows.cardinality(), len(order(Dataset.range(0).global_shuffle()))) == (10, 0)


def test_the_source_must_have_indices() -> None:
    with pytest.raises(FailedPreconditionError, match="read by their index, got filter"):
        Dataset.range(5).filter(lambda x: True).global_shuffle()
