from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.core.values import UNKNOWN_CARDINALITY
from raydist.dataset import Dataset
from raydist.pipelines.elements.spec import TensorSpec
from tests.contracts.op import collect, iterate


def test_rows_come_one_by_one() -> None:
    dataset = Dataset.from_tensor_slices((np.arange(6).reshape(3, 2), [["a", "b"], ["c", "d"], ["e", "f"]])).unbatch()
    assert [(int(n), t) for n, t in dataset] == list(enumerate("abcdef"))
    assert dataset.element_spec == (TensorSpec((), "int64"), TensorSpec((), "U"))
    assert dataset.cardinality() == UNKNOWN_CARDINALITY


def test_batches_of_differing_size() -> None:
    ragged = Dataset.range(4).map(lambda x: np.arange(x), output_spec=TensorSpec((None,), "int64"))
    assert [int(x) for x in ragged.unbatch()] == [0, 0, 1, 0, 1, 2]


def test_leaves_must_share_their_first_dimension() -> None:
    items = collect(iterate(Dataset.range(3).map(lambda x: (np.zeros(2), np.zeros(3 if x == 1 else 2))).unbatch()))
    assert len(items) == 5
    assert items[2][0] == "InvalidArgumentError"
    with pytest.raises(InvalidArgumentError, match="must share their first dimension"):
        next(iterate(Dataset.range(3).unbatch()))
    with pytest.raises(InvalidArgumentError, match="with a first dimension to split"):
        _ = Dataset.range(3).unbatch().element_spec


def test_map_batches_gets_structures_of_arrays_and_may_change_the_count() -> None:
    sizes: list[int] = []

    def evens(x: np.ndarray) -> Any:
        sizes.append(len(x))
        return x[x % 2 == 0]

    assert [int(x) for x in Dataset.range(7).map_batches(evens, batch_size=4)] == [0, 2, 4, 6]
    assert sizes == [4, 3]


def test_rows_without_numbers_come_one_by_one_too() -> None:
    boxes = np.empty((8, 0, 4), np.float32)
    batches = Dataset.from_tensor_slices({"x": np.arange(8), "boxes": boxes}).batch(4)
    for dataset in (batches.unbatch(), batches.rebatch(2).unbatch()):
        rows = list(dataset)
        assert [int(row["x"]) for row in rows] == list(range(8))
        assert {tuple(row["boxes"].shape) for row in rows} == {(0, 4)}
