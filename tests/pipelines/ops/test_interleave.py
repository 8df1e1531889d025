from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.core.values import AUTOTUNE, UNKNOWN_CARDINALITY
from raydist.dataset import Dataset
from raydist.pipelines.elements.spec import TensorSpec
from tests.contracts.op import collect, iterate
from tests.pipelines.model import recorder


def copies(x: Any) -> Dataset:
    return Dataset.from_tensors(x).repeat(int(x))


# tf.data: lengths of the datasets, cycle_length, block_length, elements.
ORDERS = [
    ([4, 5, 6], 2, 1, [4, 5, 4, 5, 4, 5, 4, 5, 5, 6, 6, 6, 6, 6, 6]),
    ([4, 5, 6], 2, 3, [4, 4, 4, 5, 5, 5, 4, 5, 5, 6, 6, 6, 6, 6, 6]),
    ([1, 3, 2, 4], 3, 2, [1, 3, 3, 2, 2, 4, 4, 3, 4, 4]),
    ([4, 0, 6], 2, 1, [4, 4, 6, 4, 6, 4, 6, 6, 6, 6]),
    ([4, 5, 6], 7, 2, [4, 4, 5, 5, 6, 6, 4, 4, 5, 5, 6, 6, 5, 6, 6]),
    ([4, 5, 6] * 2, 2, 1, [4, 5, 4, 5, 4, 5, 4, 5, 5, 6, 6, 4, 6, 4, 6, 4, 6, 4, 6, 5, 6, 5, 6, 5, 6, 5, 6, 5, 6, 6]),
    ([4, 5, 6] * 2, 2, 3, [4, 4, 4, 5, 5, 5, 4, 5, 5, 6, 6, 6, 4, 4, 4, 6, 6, 6, 4, 5, 5, 5, 6, 6, 6, 5, 5, 6, 6, 6]),
]  # fmt: skip


@pytest.mark.parametrize(("lengths", "cycle_length", "block_length", "expected"), ORDERS)
@pytest.mark.parametrize("calls", [None, 1, AUTOTUNE])
def test_order(
    lengths: list[int], cycle_length: int, block_length: int, expected: list[int], calls: int | None
) -> None:
    dataset = Dataset.from_tensor_slices(lengths).interleave(copies, cycle_length, block_length, calls)
    assert [int(x) for x in dataset] == expected
    assert [int(x) for batch in dataset.batch(7) for x in batch] == expected


def test_whole_rounds_of_blocks() -> None:
    dataset = Dataset.range(3).interleave(lambda n: Dataset.range(1000 * n, 1000 * n + 100), 3, 2)
    got = [int(x) for batch in dataset.batch(300) for x in batch]
    assert got[:8] == [0, 1, 1000, 1001, 2000, 2001, 2, 3]
    assert got == [1000 * n + 2 * turn + k for turn in range(50) for n in range(3) for k in range(2)]


def test_nothing_is_read_beyond_what_is_handed_out() -> None:
    calls: list[int] = []
    note = recorder(calls)
    dataset = Dataset.range(4).interleave(lambda n: Dataset.range(n * 100, n * 100 + 50).map(note), 2)
    assert [int(x) for x in dataset.take(5)] == [0, 100, 1, 101, 2]
    assert sorted(calls) == [0, 1, 2, 100, 101]


def test_flat_map_is_one_after_the_other() -> None:
    dataset = Dataset.zip(Dataset.range(3), Dataset.range(3)).flat_map(lambda a, b: Dataset.range(a + b))
    assert [int(x) for x in dataset] == [0, 1, 0, 1, 2, 3]
    rows = Dataset.from_tensor_slices(np.arange(6).reshape(3, 2)).flat_map(Dataset.from_tensor_slices)
    assert [int(x) for x in rows] == list(range(6))


def test_random_choices_differ_from_dataset_to_dataset() -> None:
    dataset = Dataset.range(4).flat_map(lambda _: Dataset.range(50).shuffle(50).batch(50))
    orders = [batch.tolist() for batch in dataset]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == list(range(50)) for order in orders)


def test_errors_stand_in_their_places() -> None:
    inner = collect(iterate(Dataset.range(2).interleave(lambda n: Dataset.range(2).map(lambda x: 2 // int(x - n)), 2)))
    assert [item[0] if isinstance(item, tuple) else int(item) for item in inner] == [
        *("ZeroDivisionError", -2, 2, "ZeroDivisionError")
    ]
    iterator = iterate(Dataset.range(3).flat_map(lambda n: Dataset.range(2 // int(n - 1))))
    with pytest.raises(ZeroDivisionError) as caught:
        next(iterator)
    assert "element 1 of its input" in caught.value.__notes__[0]
    assert [int(x) for x in iterator] == [0, 1]


def test_the_function_must_return_one_kind_of_dataset() -> None:
    (item,) = collect(iterate(Dataset.range(1).flat_map(lambda x: x)))
    assert item[0] == "SpecError"
    assert "must return a Dataset, got" in item[1]
    mixed = Dataset.range(2).flat_map(lambda n: Dataset.from_tensors("text" if n else 1.0))
    assert [item[0] for item in collect(iterate(mixed))[1:]] == ["SpecError"]


def test_spec_and_cardinality() -> None:
    dataset = Dataset.range(3).repeat().interleave(lambda n: Dataset.from_tensors((n, "text")))
    assert dataset.element_spec == (TensorSpec((), "int64"), TensorSpec((), "str"))
    assert dataset.cardinality() == UNKNOWN_CARDINALITY


@pytest.mark.parametrize("arguments", [(0,), (-2,), (2, 0), (2, -1), (2, 1, 0), (2, 1, 3), (2, 1, -2)])
def test_bad_arguments(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="must be"):
        Dataset.range(3).interleave(copies, *arguments)


def test_bad_types() -> None:
    with pytest.raises(InvalidArgumentError, match="flat_map needs a function, got 3"):
        Dataset.range(3).flat_map(3)  # type: ignore[arg-type]  # the point of this test
    with pytest.raises(TypeError, match="deterministic must be a bool"):
        Dataset.range(3).interleave(copies, deterministic="no")  # type: ignore[arg-type]  # the point of this test


def test_counts_inside_may_be_numpy_numbers() -> None:
    dataset = Dataset.range(1, 3).flat_map(lambda n: Dataset.range(9).skip(n).take(2 * n).shard(n, n - 1).repeat(n))
    iterator = iterate(dataset)
    next(iterator)
    resumed = iterate(dataset)
    resumed.load_state_dict(json.loads(json.dumps(iterator.state_dict())))
    assert [int(x) for x in resumed] == [2, 3, 5, 3, 5]
