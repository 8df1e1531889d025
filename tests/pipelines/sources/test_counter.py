from __future__ import annotations

import pytest

from raydist.dataset import Dataset
from raydist.errors import InvalidArgumentError
from raydist.pipelines.elements.spec import TensorSpec
from raydist.values import INFINITE_CARDINALITY


def test_counts_from_start_by_step() -> None:
    assert [int(x) for x in Dataset.counter().take(3)] == [0, 1, 2]
    assert [int(x) for x in Dataset.counter(5, -2).take(4)] == [5, 3, 1, -1]
    (batch,) = Dataset.counter(start=1).batch(10_000).take(1)
    assert batch.tolist() == list(range(1, 10_001))


def test_spec_and_cardinality() -> None:
    dataset = Dataset.counter(dtype="uint8")
    assert dataset.element_spec == TensorSpec((), "uint8")
    assert dataset.cardinality() == INFINITE_CARDINALITY


def test_only_whole_numbers() -> None:
    with pytest.raises(InvalidArgumentError, match="start must be a whole number, got 0.5"):
        Dataset.counter(0.5)  # type: ignore[arg-type]  # the point of this test
