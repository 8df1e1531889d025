from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.core.values import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from raydist.dataset import Dataset
from raydist.pipelines.elements.spec import TensorSpec
from tests.contracts.op import collect, iterate

RAGGED = Dataset.range(1, 5).map(lambda n: np.full(n, n), output_spec=TensorSpec((None,), "int64"))


def test_the_longest_of_each_batch_decides() -> None:
    assert [batch.tolist() for batch in RAGGED.padded_batch(2)] == [[[1, 0], [2, 2]], [[3, 3, 3, 0], [4, 4, 4, 4]]]


def test_shapes_and_values() -> None:
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


def test_matrices() -> None:
    dataset = Dataset.range(1, 3).map(lambda n: np.ones((n, 3 - n), np.float32))
    (batch,) = dataset.padded_batch(2)
    assert batch.tolist() == [[[1, 1], [0, 0]], [[1, 0], [1, 0]]]


def test_spec_and_cardinality() -> None:
    assert RAGGED.padded_batch(2).element_spec == TensorSpec((None, None), "int64")
    assert RAGGED.padded_batch(2, [5], drop_remainder=True).element_spec == TensorSpec((2, 5), "int64")
    assert (RAGGED.padded_batch(3).cardinality(), RAGGED.padded_batch(3, drop_remainder=True).cardinality()) == (2, 1)
    assert RAGGED.repeat().padded_batch(3).cardinality() == INFINITE_CARDINALITY
    assert RAGGED.filter(lambda x: True).padded_batch(3).cardinality() == UNKNOWN_CARDINALITY


@pytest.mark.parametrize(
    ("shapes", "value", "error", "message"),
    [
        ((1,), None, "DataLossError", "must hold every element, got elements up to"),
        ((2, 2), None, "InvalidArgumentError", "must have 1 dimensions"),
        (None, 0.5, "SpecError", "must be one scalar of int64, got 0.5"),
        (None, "x", "SpecError", "must be one scalar of int64"),
        (None, [1, 2], "SpecError", "must be one scalar of int64"),
    ],
)
def test_what_does_not_fit_is_an_error_in_its_place(shapes: Any, value: Any, error: str, message: str) -> None:
    items = collect(iterate(RAGGED.skip(1).padded_batch(2, shapes, value)))
    assert [item[0] for item in items] == [error, error]
    assert message in items[0][1]


def test_shapes_must_be_like_the_element() -> None:
    pairs = Dataset.zip(RAGGED, RAGGED)
    (item,) = collect(iterate(pairs.padded_batch(4, ((5,),))))
    assert item[0] == "InvalidArgumentError"
    assert "padded_shapes must be a nest like the element" in item[1]


def test_elements_of_one_batch_must_have_one_rank() -> None:
    dataset = Dataset.range(2).map(lambda n: np.ones((1,) * int(n + 1)))
    (item,) = collect(iterate(dataset.padded_batch(2)))
    assert "must have one rank, got [1, 2]" in item[1]


def test_a_bad_element_spoils_its_batch() -> None:
    dataset = Dataset.range(1, 4).map(lambda n: np.ones(6 // int(n - 1)))
    items = collect(iterate(dataset.padded_batch(2)))
    assert [item[0] if isinstance(item, tuple) else item.shape for item in items] == ["ZeroDivisionError", (1, 3)]


@pytest.mark.parametrize("batch_size", [0, -1])
def test_bad_batch_size(batch_size: int) -> None:
    with pytest.raises(InvalidArgumentError, match="batch_size must be >= 1, got"):
        RAGGED.padded_batch(batch_size)
