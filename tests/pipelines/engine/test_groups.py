from __future__ import annotations

from collections.abc import Callable

import numpy as np

from raydist.dataset import Dataset
from raydist.pipelines.ops.nested import groups_of, rows_of

ROWS = [Dataset.from_tensor_slices(np.arange(at, at + 4)) for at in range(3)]
Graph = Callable[[Dataset], Dataset]


def listed(make: Graph) -> list[object] | None:
    groups = groups_of([make(rows)._op for rows in ROWS])
    if groups is None:
        return None
    assert groups.count * groups.size == groups.rows.num_rows
    return [row.tolist() for row in groups.rows.columns[0]]


def test_what_is_alike_is_computed_at_once() -> None:
    makers: list[Graph] = [
        lambda rows: rows,
        lambda rows: rows.batch(4),
        lambda rows: rows.batch(9),
        lambda rows: rows.batch(2).batch(2),
        lambda rows: Dataset.zip(rows.batch(2), rows.batch(2, drop_remainder=True)).batch(5),
    ]
    for number, make in enumerate(makers):
        one_by_one = [element for rows in ROWS for element in make(rows).as_numpy_iterator()]
        first = [element[0] if isinstance(element, tuple) else element for element in one_by_one]
        assert listed(make) == [leaf.tolist() for leaf in first], f"maker {number}"


def test_what_needs_an_iterator_or_differs_is_not() -> None:
    makers: list[Graph] = [
        lambda rows: rows.batch(3),
        lambda rows: rows.batch(9, drop_remainder=True),
        lambda rows: rows.map(lambda x: x),
        lambda rows: rows.shuffle(2),
        lambda rows: Dataset.zip(rows, rows.batch(2)),
        lambda rows: rows.batch(int(next(rows.as_numpy_iterator())) + 1),
        lambda rows: rows.take(int(next(rows.as_numpy_iterator())) + 1).batch(4),
    ]
    assert [listed(make) for make in makers] == [None] * len(makers)


def test_datasets_of_any_length_follow_each_other() -> None:
    assert [int(x) for x in Dataset.range(5).flat_map(lambda n: Dataset.range(n))] == [0, 0, 1, 0, 1, 2, 0, 1, 2, 3]
    rows = rows_of([Dataset.range(count)._op for count in (0, 3, 2)])
    assert rows is not None
    assert rows.columns[0].tolist() == [0, 1, 2, 0, 1]
    assert rows_of([Dataset.range(3)._op, Dataset.range(3, output_type="int32")._op]) is None
    assert rows_of([Dataset.range(1 << 40)._op]) is None


def test_one_dataset_shares_its_memory_and_is_read_only() -> None:
    column = np.arange(4)
    groups = groups_of([Dataset.from_tensor_slices(column).batch(2)._op])
    assert groups is not None
    assert np.shares_memory(groups.rows.columns[0], column)
    assert not groups.rows.columns[0].flags.writeable


def test_a_function_is_called_once_for_each_input_and_in_order() -> None:
    calls: list[int] = []

    def some(x: np.int64) -> Dataset:
        calls.append(int(x))
        return Dataset.from_tensors(x) if x % 3 else Dataset.range(int(x)).filter(lambda y: y % 2 == 0)

    assert [int(x) for x in Dataset.range(1, 8).flat_map(some)] == [1, 2, 0, 2, 4, 5, 0, 2, 4, 7]
    assert calls == list(range(1, 8))
