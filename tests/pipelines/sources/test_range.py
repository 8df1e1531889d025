from __future__ import annotations

import numpy as np
import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.core.values import INFINITE_CARDINALITY
from raydist.dataset import Dataset
from raydist.pipelines.elements.spec import TensorSpec


@pytest.mark.parametrize(
    "args",
    [(0,), (5,), (5, 10), (10, 5), (5, 10, 2), (10, 5, -2), (0, 0, -2), (3, 3, 1), (-4, -4, 2), (1, 0, 3), (0, 1, -3)],
)
def test_the_numbers_are_pythons(args: tuple[int, ...]) -> None:
    dataset = Dataset.range(*args)
    assert [int(x) for x in dataset] == list(range(*args))
    assert dataset.cardinality() == len(range(*args))


def test_bad_arguments() -> None:
    with pytest.raises(InvalidArgumentError, match="must not be 0"):
        Dataset.range(1, 5, 0)
    with pytest.raises(InvalidArgumentError, match="got 0 arguments"):
        Dataset.range()
    with pytest.raises(InvalidArgumentError, match="got 4 arguments"):
        Dataset.range(1, 2, 3, 4)


def test_dtype() -> None:
    assert Dataset.range(3).element_spec == TensorSpec((), np.int64)
    dataset = Dataset.range(3, output_type="float32")
    assert dataset.element_spec == TensorSpec((), np.float32)
    assert [x.dtype for x in dataset.as_numpy_iterator()] == [np.float32] * 3


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


def epochs(dataset: Dataset) -> list[list[int]]:
    first = dataset.take(5)
    return [[int(x) for x in first] for _ in range(2)]


def test_one_sequence_in_every_epoch_unless_asked_otherwise() -> None:
    one, two = epochs(Dataset.random(seed=3))
    assert one == two
    one, two = epochs(Dataset.random())
    assert one == two
    one, two = epochs(Dataset.random(seed=3, rerandomize_each_iteration=True))
    assert one != two


def test_a_seed_names_the_sequence() -> None:
    assert epochs(Dataset.random(seed=3)) == epochs(Dataset.random(seed=3))
    assert epochs(Dataset.random(seed=3)) != epochs(Dataset.random(seed=4))


def test_numbers_have_32_bits() -> None:
    (batch,) = Dataset.random(seed=1).batch(10_000).take(1)
    assert 0 <= int(batch.min()) < 1 << 22
    assert (1 << 32) - (1 << 22) < int(batch.max()) < 1 << 32
    assert Dataset.random().cardinality() == INFINITE_CARDINALITY
