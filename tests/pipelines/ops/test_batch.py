from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.core.values import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from raydist.dataset import Dataset
from raydist.pipelines.elements.spec import TensorSpec
from tests.contracts.op import collect, iterate


def lists(dataset: Dataset) -> list[Any]:
    return [x.tolist() for x in dataset.as_numpy_iterator()]


def test_the_last_batch_is_short_or_dropped() -> None:
    assert lists(Dataset.range(5).batch(2)) == [[0, 1], [2, 3], [4]]
    assert lists(Dataset.range(5).batch(2, drop_remainder=True)) == [[0, 1], [2, 3]]
    assert lists(Dataset.range(0).batch(2)) == []


def test_text_of_several_ranks() -> None:
    words = Dataset.range(2).map(lambda i: np.array(["b", "c"], object) if i else "a")
    with pytest.raises(SpecError, match=r"one shape, got \(\) and, 1 elements later, \(2,\)"):
        list(words.batch(2))


@pytest.mark.parametrize("size", [0, -1])
def test_batch_size_is_checked(size: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"batch_size must be >= 1, got {size}"):
        Dataset.range(5).batch(size)


def test_a_batch_with_a_bad_element_is_lost_whole() -> None:
    dataset = Dataset.from_tensor_slices([1, 2, 0, 4, 5]).map(lambda x: 4 // int(x)).batch(2)
    items = collect(iterate(dataset))
    assert items[0].tolist() == [4, 2]
    assert items[1][0] == "ZeroDivisionError"
    assert items[2].tolist() == [0]
    assert len(items) == 3


def test_elements_of_differing_shape_are_an_error_that_shows_both() -> None:
    dataset = Dataset.range(6).map(lambda x: np.zeros(3 if x == 2 else 2)).batch(2)
    items = collect(iterate(dataset))
    assert items[0].shape == items[2].shape == (2, 2)
    assert items[1][0] == "SpecError"
    assert "must have one shape, got (3,) and, 1 elements later, (2,)" in items[1][1]


def test_spec_is_static_only_where_every_batch_is_full() -> None:
    rows = Dataset.from_tensor_slices((np.zeros((4, 3), np.uint8), ["a"] * 4))
    assert rows.batch(2).element_spec == (TensorSpec((None, 3), np.uint8), TensorSpec((None,), "U"))
    assert rows.batch(2, drop_remainder=True).element_spec[0] == TensorSpec((2, 3), np.uint8)


def test_cardinality() -> None:
    assert Dataset.range(5).batch(2).cardinality() == 3
    assert Dataset.range(5).batch(2, drop_remainder=True).cardinality() == 2
    assert Dataset.range(5).filter(lambda x: True).batch(2).cardinality() == UNKNOWN_CARDINALITY
    assert Dataset.range(5).repeat().batch(2).cardinality() == INFINITE_CARDINALITY


def test_text_and_nested_batches() -> None:
    text = next(iter(Dataset.from_tensor_slices([b"a", b"bc"]).batch(2)))
    assert text.dtype == object
    assert text.tolist() == [b"a", b"bc"]
    assert lists(Dataset.range(4).batch(2).batch(2)) == [[[0, 1], [2, 3]]]


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
