from __future__ import annotations

import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.core.values import UNKNOWN_CARDINALITY
from raydist.dataset import Dataset
from raydist.pipelines.elements.spec import TensorSpec
from tests.contracts.op import collect, iterate


def lists(dataset: Dataset) -> list[list[int]]:
    return [batch.tolist() for batch in dataset]


def test_sizes_are_used_in_turn() -> None:
    assert lists(Dataset.range(8).batch(4).rebatch([2, 1, 1])) == [[0, 1], [2], [3], [4, 5], [6], [7]]
    assert lists(Dataset.range(7).batch(2).rebatch(3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert lists(Dataset.range(7).batch(2).rebatch(3, drop_remainder=True)) == [[0, 1, 2], [3, 4, 5]]


def test_a_size_of_zero_is_an_empty_batch() -> None:
    assert lists(Dataset.range(2).batch(2).rebatch([0, 1])) == [[], [0], [], [1], []]
    assert lists(Dataset.range(2).batch(2).rebatch([1, 0])) == [[0], [], [1], []]
    pairs = Dataset.range(1).map(lambda x: ([0.5, 1.5], "text")).batch(1).rebatch([1, 0])
    empty = list(pairs.as_numpy_iterator())[1]
    assert (empty[0].shape, empty[0].dtype, empty[1].shape) == ((0, 2), "float32", (0,))


def test_spec_and_cardinality() -> None:
    dataset = Dataset.range(8).batch(4)
    assert dataset.rebatch(2).element_spec == TensorSpec((None,), "int64")
    assert dataset.rebatch(2, drop_remainder=True).element_spec == TensorSpec((2,), "int64")
    assert dataset.repeat().rebatch(2).cardinality() == UNKNOWN_CARDINALITY


def test_an_error_takes_the_place_of_a_row() -> None:
    dataset = Dataset.range(6).map(lambda x: 6 // int(x - 1)).batch(2).rebatch([1, 2])
    assert [item[0] if isinstance(item, tuple) else item.tolist() for item in collect(iterate(dataset))] == [
        *("ZeroDivisionError", [6, 3], [2], [1])
    ]


@pytest.mark.parametrize("sizes", [0, -1, [], [0, 0], [2, -1]])
def test_bad_sizes(sizes: int | list[int]) -> None:
    with pytest.raises(InvalidArgumentError, match="sizes of a rebatch must be >= 0"):
        Dataset.range(4).batch(2).rebatch(sizes)


def test_elements_must_have_rows() -> None:
    (item,) = collect(iterate(Dataset.range(1).rebatch(2)))
    assert item[0] == "InvalidArgumentError"


@pytest.mark.parametrize(("rows", "batches"), [(4, [[0, 1], [], [2], [3]]), (3, [[0, 1], [], [2]])])
def test_no_empty_batch_follows_the_end_of_the_input(rows: int, batches: list[list[int]]) -> None:
    dataset = Dataset.range(rows).batch(3).rebatch([2, 0, 1])
    assert lists(dataset) == batches
    iterator = iterate(dataset)
    for _ in batches:
        next(iterator)
    resumed = iterate(dataset)
    resumed.load_state_dict(iterator.state_dict())
    assert collect(resumed) == []


def test_rows_tell_what_an_empty_batch_is_where_nothing_else_does() -> None:
    nothing = Dataset.range(3).filter(lambda x: False).map(lambda x: [0.5, 1.5])
    rows = nothing.concatenate(Dataset.range(1).map(lambda x: [0.5, 1.5]))
    unknown = nothing.take_while(lambda x: True).concatenate(Dataset.range(2).skip(0).map(lambda x: [0.5, 1.5]))
    for dataset in (rows, unknown):
        empty = list(dataset.batch(1).rebatch([1, 0]).as_numpy_iterator())[1]
        assert (empty.shape, empty.dtype) == ((0, 2), "float32")
