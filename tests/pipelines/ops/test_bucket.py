from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.dataset import Dataset
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.ops import bucket
from raydist.pipelines.ops.bucket import Buckets
from tests.contracts.op import collect, iterate, same
from tests.pipelines.storing_executor import InStore, StoringExecutor

INTS = TensorSpec((None,), np.int64)


def sequences(*lengths: int) -> Dataset:
    return Dataset.from_tensor_slices(list(lengths)).map(lambda n: np.full(n, n), output_spec=INTS)


def shapes(dataset: Dataset) -> list[tuple[int, ...]]:
    return [tuple(batch.shape) for batch in dataset]


def test_lengths_go_into_buckets() -> None:
    buckets = Buckets((2, 4), (1, 1, 1))
    assert [buckets.index(length) for length in range(6)] == [0, 0, 1, 1, 2, 2]
    assert Buckets((), (3,)).index(10) == 0


def test_batches_are_padded_to_their_longest() -> None:
    dataset = sequences(1, 5, 2, 9, 3, 1).bucket_by_sequence_length(len, [3, 6], [2, 2, 2])
    assert [batch.tolist() for batch in dataset] == [
        [[1, 0], [2, 2]],
        [[5, 5, 5, 5, 5], [3, 3, 3, 0, 0]],
        [[1]],
        [[9] * 9],
    ]
    assert dataset.element_spec == TensorSpec((None, None), np.int64)


def test_padding_to_the_boundary() -> None:
    dataset = sequences(1, 4, 2, 3).bucket_by_sequence_length(
        len, [3, 6], [2, 2, 2], padding_values=-1, pad_to_bucket_boundary=True
    )
    assert [batch.tolist() for batch in dataset] == [[[1, -1], [2, 2]], [[4, 4, 4, 4, -1], [3, 3, 3, -1, -1]]]


def test_padded_shapes_say_what_is_unknown() -> None:
    rows = Dataset.from_tensor_slices([2, 1]).map(lambda n: (np.zeros((n, 2)), n))
    dataset = rows.bucket_by_sequence_length(
        lambda x, n: n, [4], [2, 2], padded_shapes=([None, 3], []), pad_to_bucket_boundary=True
    )
    assert [tuple(x.shape) for x, _ in dataset] == [(2, 3, 3)]


def test_a_length_that_was_only_found_on_the_first_elements_pads_nothing() -> None:
    dataset = Dataset.from_tensor_slices([1, 1, 1, 2]).map(lambda n: np.full(n, n))
    items = collect(iterate(dataset.bucket_by_sequence_length(len, [4], [1, 1], pad_to_bucket_boundary=True)))
    assert items[0].tolist() == [[1]]
    assert items[3][0] == "SpecError"
    assert "Declare output_spec=" in items[3][1]


def test_lengths_that_differ_among_the_first_elements_are_padded() -> None:
    dataset = Dataset.range(1, 3).map(lambda n: np.full(n, n))
    items = collect(iterate(dataset.bucket_by_sequence_length(len, [4], [1, 1], pad_to_bucket_boundary=True)))
    assert [item.tolist() for item in items] == [[[1, 0, 0]], [[2, 2, 0]]]


def test_longer_than_the_last_boundary() -> None:
    dataset = sequences(1, 7, 2).bucket_by_sequence_length(len, [3], [2, 2], pad_to_bucket_boundary=True)
    items = collect(iterate(dataset))
    assert items[0][0] == "InvalidArgumentError"
    assert "shorter than the last boundary, 3, got length 7" in items[0][1]
    assert items[1].tolist() == [[1, 0], [2, 2]]


def test_remainders_and_no_padding() -> None:
    source = sequences(1, 1, 4, 4, 1)
    assert shapes(source.bucket_by_sequence_length(len, [2], [2, 3], drop_remainder=True)) == [(2, 1)]
    assert shapes(source.bucket_by_sequence_length(len, [2], [2, 3], no_padding=True)) == [(2, 1), (1, 1), (2, 4)]
    items = collect(iterate(sequences(1, 2).bucket_by_sequence_length(len, [9], [2, 1], no_padding=True)))
    assert [item[0] for item in items] == ["SpecError"]
    even = source.bucket_by_sequence_length(len, [2], [2, 2], drop_remainder=True)
    assert even.element_spec == TensorSpec((2, None), np.int64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([2, 4], [1, 1]), "one entry more than bucket_boundaries, got 2 sizes for 2 boundaries"),
        (([4, 2], [1, 1, 1]), r"must ascend, got \[4, 2\]"),
        (([2], [1, 0]), r"must be >= 1, got \[1, 0\]"),
        (([2.5], [1, 1]), "bucket_boundaries must be a whole number, got 2.5"),
        (([], [1], None, None, True), "needs at least one boundary"),
    ],
)
def test_bad_arguments(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        sequences(1).bucket_by_sequence_length(len, *arguments)


def test_a_length_must_be_a_whole_number() -> None:
    items = collect(iterate(sequences(1).bucket_by_sequence_length(lambda x: 1.5, [2], [1, 1])))
    assert [item[0] for item in items] == ["SpecError"]


def test_an_element_that_waits_long_keeps_no_stored_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "_MOST_KEPT_BLOCKS", 1)
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
