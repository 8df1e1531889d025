"""The order of a cycle of slots, against the algorithm written down element by element."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from raydist.core.values import AUTOTUNE
from raydist.dataset import Dataset
from raydist.pipelines.ops.nested import groups_of
from tests.contracts.op import collect, iterate
from tests.pipelines.tables import recorder


def copies(x: Any) -> Dataset:
    return Dataset.from_tensors(x).repeat(int(x))


# tf.data: lengths of the datasets, cycle_length, block_length, elements.
ORDERS = [
    ([4, 5, 6], 2, 1, [4, 5, 4, 5, 4, 5, 4, 5, 5, 6, 6, 6, 6, 6, 6]),
    ([1, 3, 2, 4], 3, 2, [1, 3, 3, 2, 2, 4, 4, 3, 4, 4]),
    ([4, 0, 6], 2, 1, [4, 4, 6, 4, 6, 4, 6, 6, 6, 6]),
    ([4, 5, 6], 7, 2, [4, 4, 5, 5, 6, 6, 4, 4, 5, 5, 6, 6, 5, 6, 6]),
    ([4, 5, 6] * 2, 2, 3, [4, 4, 4, 5, 5, 5, 4, 5, 5, 6, 6, 6, 4, 4, 4, 6, 6, 6, 4, 5, 5, 5, 6, 6, 6, 5, 5, 6, 6, 6]),
]  # fmt: skip


def test_order() -> None:
    for lengths, cycle_length, block_length, expected in ORDERS:
        for calls in (None, 1, AUTOTUNE):
            dataset = Dataset.from_tensor_slices(lengths).interleave(copies, cycle_length, block_length, calls)
            case = f"{lengths}, {cycle_length}, {block_length}, {calls}"
            assert [int(x) for x in dataset] == expected, case
            assert [int(x) for batch in dataset.batch(7) for x in batch] == expected, case


def test_nothing_is_read_beyond_what_is_handed_out() -> None:
    calls: list[int] = []
    note = recorder(calls)
    dataset = Dataset.range(4).interleave(lambda n: Dataset.range(n * 100, n * 100 + 50).map(note), 2)
    assert [int(x) for x in dataset.take(5)] == [0, 100, 1, 101, 2]
    assert sorted(calls) == [0, 1, 2, 100, 101]


def test_random_choices_differ_from_dataset_to_dataset() -> None:
    dataset = Dataset.range(4).flat_map(lambda _: Dataset.range(50).shuffle(50).batch(50))
    orders = [batch.tolist() for batch in dataset]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == list(range(50)) for order in orders)


def test_errors_stand_in_their_places() -> None:
    iterator = iterate(Dataset.range(3).flat_map(lambda n: Dataset.range(2 // int(n - 1))))
    with pytest.raises(ZeroDivisionError) as caught:
        next(iterator)
    assert "element 1 of its input" in caught.value.__notes__[0]
    assert [int(x) for x in iterator] == [0, 1]


def test_the_function_must_return_one_kind_of_dataset() -> None:
    (item,) = collect(iterate(Dataset.range(1).flat_map(lambda x: x)))
    assert item[0] == "SpecError"
    assert "must return a Dataset, got" in item[1]
    mixed = Dataset.range(2).flat_map(lambda n: Dataset.from_tensors("text" if n else 1.0))
    assert [item[0] for item in collect(iterate(mixed))[1:]] == ["SpecError"]


def test_counts_inside_may_be_numpy_numbers() -> None:
    dataset = Dataset.range(1, 3).flat_map(lambda n: Dataset.range(9).skip(n).take(2 * n).shard(n, n - 1).repeat(n))
    iterator = iterate(dataset)
    next(iterator)
    resumed = iterate(dataset)
    resumed.load_state_dict(json.loads(json.dumps(iterator.state_dict())))
    assert [int(x) for x in resumed] == [2, 3, 5, 3, 5]


def test_elements_without_numbers_are_woven_too() -> None:
    def empty(n: Any) -> Dataset:
        return Dataset.from_tensor_slices((np.full(40, n), np.empty((40, 0, 2))))

    found = list(Dataset.range(4).interleave(empty, cycle_length=4, block_length=2))
    assert [int(n) for n, _ in found[:16]] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    assert len(found) == 160
    assert {tuple(row.shape) for _, row in found} == {(0, 2)}


def test_a_slow_dataset_does_not_hold_back_others() -> None:
    release = threading.Event()

    def waits(x: np.int64) -> np.int64:
        if x == 0:
            release.wait(50)
        return x

    dataset = Dataset.range(3).interleave(
        lambda n: Dataset.range(10 * n, 10 * n + 5).map(waits), 3, num_parallel_calls=3, deterministic=False
    )
    iterator = iterate(dataset)
    early = [int(next(iterator)) for _ in range(10)]
    release.set()
    assert sorted(early) == [10, 11, 12, 13, 14, 20, 21, 22, 23, 24]
    assert collect(iterator) == [0, 1, 2, 3, 4]


def test_datasets_that_are_alike_are_computed_at_once() -> None:
    sources = [Dataset.from_tensor_slices(np.arange(at, at + 4)) for at in range(3)]
    makers: list[tuple[Callable[[Dataset], Dataset], bool]] = [
        (lambda rows: rows, True),
        (lambda rows: rows.batch(9), True),
        (lambda rows: Dataset.zip(rows.batch(2), rows.batch(2, drop_remainder=True)).batch(5), True),
        (lambda rows: rows.batch(3), False),
        (lambda rows: rows.batch(9, drop_remainder=True), False),
        (lambda rows: rows.shuffle(2), False),
        (lambda rows: Dataset.zip(rows, rows.batch(2)), False),
        (lambda rows: rows.take(int(next(rows.as_numpy_iterator())) + 1).batch(4), False),
    ]
    for number, (make, alike) in enumerate(makers):
        groups = groups_of([make(rows)._op for rows in sources])
        assert (groups is not None) == alike, f"maker {number}"
        if groups is not None:
            elements = [element for rows in sources for element in make(rows).as_numpy_iterator()]
            expected = [element[0] if isinstance(element, tuple) else element for element in elements]
            assert [row.tolist() for row in groups.rows.columns[0]] == [leaf.tolist() for leaf in expected]
            assert groups.count * groups.size == groups.rows.num_rows


def test_a_function_is_called_once_for_each_input_and_in_order() -> None:
    calls: list[int] = []

    def some(x: np.int64) -> Dataset:
        calls.append(int(x))
        return Dataset.from_tensors(x) if x % 3 else Dataset.range(int(x)).filter(lambda y: y % 2 == 0)

    assert [int(x) for x in Dataset.range(1, 8).flat_map(some)] == [1, 2, 0, 2, 4, 5, 0, 2, 4, 7]
    assert calls == list(range(1, 8))
