"""Batches, rows, and padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from raydist.core.errors import SpecError
from raydist.dataset import Dataset
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.ops.padded_batch import Padding
from tests.contracts.op import collect, iterate


def test_elements_of_differing_shape_are_an_error_that_shows_both() -> None:
    items = collect(iterate(Dataset.range(6).map(lambda x: np.zeros(3 if x == 2 else 2)).batch(2)))
    assert items[0].shape == items[2].shape == (2, 2)
    assert items[1][0] == "SpecError"
    assert "must have one shape, got (3,) and, 1 elements later, (2,)" in items[1][1]
    words = Dataset.range(2).map(lambda i: np.array(["b", "c"], object) if i else "a")
    with pytest.raises(SpecError, match=r"one shape, got \(\) and, 1 elements later, \(2,\)"):
        list(words.batch(2))


def test_a_batch_is_its_receivers_own() -> None:
    source = np.ones((4, 2), np.float32)
    dataset = Dataset.from_tensor_slices(source).batch(2)
    for batch in dataset:
        assert isinstance(batch, torch.Tensor)
        batch.zero_()
    assert (source == 1).all()
    for array in dataset.as_numpy_iterator():
        array[:] = 0
    assert (source == 1).all()


def test_rows_come_one_by_one() -> None:
    dataset = Dataset.from_tensor_slices((np.arange(6).reshape(3, 2), [["a", "b"], ["c", "d"], ["e", "f"]])).unbatch()
    assert [(int(n), t) for n, t in dataset] == list(enumerate("abcdef"))
    ragged = Dataset.range(4).map(lambda x: np.arange(x), output_spec=TensorSpec((None,), "int64"))
    assert [int(x) for x in ragged.unbatch()] == [0, 0, 1, 0, 1, 2]
    boxes = np.empty((8, 0, 4), np.float32)
    batches = Dataset.from_tensor_slices({"x": np.arange(8), "boxes": boxes}).batch(4)
    for dataset in (batches.unbatch(), batches.rebatch(2).unbatch()):
        rows = list(dataset)
        assert [int(row["x"]) for row in rows] == list(range(8))
        assert {tuple(row["boxes"].shape) for row in rows} == {(0, 4)}, "rows without numbers"


def test_map_batches_gets_structures_of_arrays_and_may_change_the_count() -> None:
    sizes: list[int] = []

    def evens(x: np.ndarray) -> Any:
        sizes.append(len(x))
        return x[x % 2 == 0]

    assert [int(x) for x in Dataset.range(7).map_batches(evens, batch_size=4)] == [0, 2, 4, 6]
    assert sizes == [4, 3]


def lists(dataset: Dataset) -> list[list[int]]:
    return [batch.tolist() for batch in dataset]


def test_sizes_are_used_in_turn_and_one_of_zero_is_an_empty_batch() -> None:
    assert lists(Dataset.range(8).batch(4).rebatch([2, 1, 1])) == [[0, 1], [2], [3], [4, 5], [6], [7]]
    assert lists(Dataset.range(7).batch(2).rebatch(3, drop_remainder=True)) == [[0, 1, 2], [3, 4, 5]]
    assert lists(Dataset.range(2).batch(2).rebatch([0, 1])) == [[], [0], [], [1], []]
    assert lists(Dataset.range(2).batch(2).rebatch([1, 0])) == [[0], [], [1], []]
    assert lists(Dataset.range(3).batch(3).rebatch([2, 0, 1])) == [[0, 1], [], [2]]
    pairs = Dataset.range(1).map(lambda x: ([0.5, 1.5], "text")).batch(1).rebatch([1, 0])
    empty = list(pairs.as_numpy_iterator())[1]
    assert (empty[0].shape, empty[0].dtype, empty[1].shape) == ((0, 2), "float32", (0,))


def test_rows_tell_what_an_empty_batch_is_where_nothing_else_does() -> None:
    nothing = Dataset.range(3).filter(lambda x: False).map(lambda x: [0.5, 1.5])
    rows = nothing.concatenate(Dataset.range(1).map(lambda x: [0.5, 1.5]))
    unknown = nothing.take_while(lambda x: True).concatenate(Dataset.range(2).skip(0).map(lambda x: [0.5, 1.5]))
    for dataset in (rows, unknown):
        empty = list(dataset.batch(1).rebatch([1, 0]).as_numpy_iterator())[1]
        assert (empty.shape, empty.dtype) == ((0, 2), "float32")


RAGGED = Dataset.range(1, 5).map(lambda n: np.full(n, n), output_spec=TensorSpec((None,), "int64"))


def test_padding() -> None:
    assert [batch.tolist() for batch in RAGGED.padded_batch(2)] == [[[1, 0], [2, 2]], [[3, 3, 3, 0], [4, 4, 4, 4]]]
    batches = list(RAGGED.padded_batch(3, padded_shapes=(5,), padding_values=-1))
    assert batches[0].tolist() == [[1, -1, -1, -1, -1], [2, 2, -1, -1, -1], [3, 3, 3, -1, -1]]
    assert [batch.shape for batch in batches] == [(3, 5), (1, 5)]
    assert [batch.shape for batch in RAGGED.padded_batch(3, [-1], drop_remainder=True)] == [(3, 3)]


def test_nests_and_text() -> None:
    dataset = RAGGED.map(lambda row: {"row": row, "words": ["x"] * len(row), "n": len(row)})
    shapes = {"row": (None,), "words": [5], "n": ()}
    (batch,) = dataset.take(2).padded_batch(2, shapes, {"row": 9, "words": None, "n": None}).as_numpy_iterator()
    assert batch["row"].tolist() == [[1, 9], [2, 2]]
    assert batch["words"].tolist() == [["x", "", "", "", ""], ["x", "x", "", "", ""]]
    assert batch["n"].tolist() == [1, 2]


def test_what_does_not_fit_is_an_error_in_its_place() -> None:
    for shapes, value, error, message in (
        ((1,), None, "DataLossError", "must hold every element, got elements up to"),
        ((2, 2), None, "InvalidArgumentError", "must have 1 dimensions"),
        (None, 0.5, "SpecError", "must be one scalar of int64, got 0.5"),
        (None, "x", "SpecError", "must be one scalar of int64"),
        (None, [1, 2], "SpecError", "must be one scalar of int64"),
    ):
        items = collect(iterate(RAGGED.skip(1).padded_batch(2, shapes, value)))
        assert [item[0] for item in items] == [error, error], message
        assert message in items[0][1]
    (item,) = collect(iterate(Dataset.zip(RAGGED, RAGGED).padded_batch(4, ((5,),))))
    assert item[0] == "InvalidArgumentError"
    assert "padded_shapes must be a nest like the element" in item[1]
    ranks = Dataset.range(2).map(lambda n: np.ones((1,) * int(n + 1)))
    (item,) = collect(iterate(ranks.padded_batch(2)))
    assert "must have one rank, got [1, 2]" in item[1]


def test_python_numbers_fill_what_they_fit() -> None:
    fitting: list[tuple[str, Any]] = [("float64", 2), ("float32", 0.5), ("uint8", 7), ("bool", True)]
    for dtype, value in fitting:
        padded = Padding(values=value).batch(block_of_rows([np.ones(1, dtype), np.ones(2, dtype)]))
        assert padded.columns[0].dtype == dtype
        assert padded.columns[0][0, 0].tolist() == [1, value]
        assert padded.specs == (TensorSpec((2, 2), dtype),)
    wrong: list[tuple[str, Any]] = [("uint8", -1), ("uint8", 300), ("int8", 128), ("int32", 0.5)]
    for dtype, value in wrong:
        with pytest.raises(SpecError, match=rf"must be one scalar of {dtype}, got {value}"):
            Padding(values=value).batch(block_of_rows([np.ones(1, dtype), np.ones(2, dtype)]))
