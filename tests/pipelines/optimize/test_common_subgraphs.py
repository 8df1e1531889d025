from __future__ import annotations

import numpy as np

from raydist.dataset import Dataset
from tests.contracts.op import check_op
from tests.pipelines.optimize.rewriting import assert_same, optimised_names, rewrites_of


def noisy(x: np.int64, *, rng: np.random.Generator) -> float:
    return float(x) + float(rng.random())


def some_fail(x: np.int64) -> float:
    return 6 / int(x - 2)


def test_a_dataset_that_is_zipped_with_itself_is_read_once() -> None:
    calls: list[int] = []

    def note(x: np.int64) -> np.int64:
        calls.append(int(x))
        return x * 2

    numbers = Dataset.range(4)
    shared = numbers.map(note)
    assert [tuple(map(int, pair)) for pair in Dataset.zip(shared, shared)] == [(0, 0), (2, 2), (4, 4), (6, 6)]
    assert calls == [0, 1, 2, 3]
    calls.clear()
    assert len(list(Dataset.zip(numbers.map(note), numbers.map(note)))) == 4
    assert calls == [0, 1, 2, 3], "two maps of one dataset by one function are one"


def test_both_parts_are_private() -> None:
    rows = Dataset.range(3).map(lambda x: np.full(2, x))
    for first, second in Dataset.zip(rows, rows).as_numpy_iterator():
        first += 10
        assert (first - 10 == second).all()
    ragged = Dataset.range(1, 4).map(np.arange)
    for first, second in Dataset.zip(ragged, ragged).as_numpy_iterator():
        first += 10
        assert second[0] == 0


def test_contract() -> None:
    errors = Dataset.range(6).map(some_fail)
    check_op(lambda: Dataset.zip({"a": errors, "b": (Dataset.range(9), errors)}).batch(2))


def test_random_choices_and_functions_in_order_are_made_twice() -> None:
    numbers = Dataset.range(9)
    apart = [
        Dataset.zip(numbers.map(noisy), numbers.map(noisy)),
        Dataset.zip(numbers.shuffle(9), numbers.shuffle(9)),
        Dataset.zip(numbers.map(abs, num_parallel_calls=1), numbers.map(abs, num_parallel_calls=1)),
        Dataset.zip(numbers.take(3), numbers.take(4)),
        Dataset.zip(numbers, Dataset.range(8)),
    ]
    for dataset in apart:
        assert "common_subgraph_elimination" not in rewrites_of(dataset)
    in_order = numbers.map(abs, num_parallel_calls=1)
    assert rewrites_of(Dataset.zip(in_order, in_order)) == ()


def test_one_shuffle_at_two_places_has_one_order() -> None:
    shuffled = Dataset.range(9).shuffle(4).repeat(2)
    dataset = Dataset.zip(shuffled, shuffled)
    assert optimised_names(dataset) == ["range", "shuffle", "repeat", "zip"]
    assert rewrites_of(dataset) == ("common_subgraph_elimination",)
    assert len(assert_same(dataset, "common_subgraph_elimination")) == 18
