from __future__ import annotations

import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.core.values import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from raydist.dataset import Dataset
from raydist.pipelines.elements.spec import TensorSpec
from tests.contracts.op import collect, iterate, same
from tests.pipelines.storing_executor import StoringExecutor


def test_numbers_count_from_start() -> None:
    pairs = list(Dataset.from_tensor_slices({"x": [7.0, 8.0]}).enumerate(start=5))
    assert [(int(number), float(element["x"])) for number, element in pairs] == [(5, 7.0), (6, 8.0)]
    assert [int(number) for number, _ in Dataset.range(6).filter(lambda x: x > 2).enumerate()] == [0, 1, 2]


def test_spec_and_cardinality() -> None:
    dataset = Dataset.range(3)
    assert dataset.enumerate().element_spec == (TensorSpec((), "int64"), TensorSpec((), "int64"))
    assert dataset.enumerate().cardinality() == 3
    assert dataset.repeat().enumerate().cardinality() == INFINITE_CARDINALITY
    assert dataset.filter(lambda x: True).enumerate().cardinality() == UNKNOWN_CARDINALITY


def test_an_error_takes_a_number() -> None:
    items = collect(iterate(Dataset.range(3).map(lambda x: 6 // int(x - 1)).enumerate()))
    assert [int(items[0][0]), items[1][0], int(items[2][0])] == [0, "ZeroDivisionError", 2]


def test_start_must_be_a_whole_number() -> None:
    with pytest.raises(InvalidArgumentError, match="start must be a whole number, got 1.5"):
        Dataset.range(3).enumerate(1.5)  # type: ignore[arg-type]  # the point of this test


def test_alone_with_input_workers_numbers_and_unbatches_row_ids() -> None:
    dataset = Dataset.range(40).map(lambda x: x).shuffle(5, seed=1).batch(4).unbatch().enumerate().take(40)
    iterator = iterate(dataset, StoringExecutor)
    assert same(collect(iterator), collect(iterate(dataset)))
    here = {each.name: each.bytes_here for each in iterator.stats().stages}
    assert (here["unbatch-4"], here["enumerate-5"]) == (0, 40 * 8), "numbers alone are in this process"
