from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import raydist as rd
from tests.contracts.op import check_op, collect


class Squares(Dataset[Any]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise KeyError("three")
        return {"x": torch.tensor(index * index), "name": str(index)}


class Stream(IterableDataset[Any]):
    def __init__(self, length: int = 4) -> None:
        self.length = length

    def __len__(self) -> int:
        return 99  # estimates are allowed

    def __iter__(self) -> Iterator[Any]:
        buffer = torch.zeros(2)
        for i in range(self.length):
            yield buffer.fill_(i), i


def test_map_style_is_read_by_index() -> None:
    dataset = rd.Dataset.from_torch(TensorDataset(torch.arange(6).reshape(3, 2), torch.tensor([0.0, 1.0, 2.0])))
    assert len(dataset) == 3
    assert dataset.element_spec == (rd.TensorSpec((2,), "int64"), rd.TensorSpec((), "float32"))
    expected = [(np.array([2 * i, 2 * i + 1]), np.float32(i)) for i in range(3)]
    found = [(x.tolist(), float(y)) for x, y in dataset]
    assert found == [(x.tolist(), float(y)) for x, y in expected]
    check_op(lambda: dataset.shuffle(3).batch(2))
    for calls in (1, None, 2):
        check_op(lambda calls=calls: rd.Dataset.from_torch(Squares(), num_parallel_calls=calls))  # type: ignore[misc]


def test_an_error_of_a_sample_stands_in_its_place() -> None:
    found = collect(rd.Dataset.from_torch(Squares()).as_numpy_iterator())
    assert [item["name"] if isinstance(item, dict) else item[0] for item in found] == ["0", "1", "2", "KeyError", "4"]


def test_iterable_style_is_iterated_afresh() -> None:
    dataset = rd.Dataset.from_torch(Stream())
    assert dataset.cardinality() == rd.UNKNOWN_CARDINALITY
    assert dataset.element_spec == (rd.TensorSpec((2,), "float32"), rd.TensorSpec((), "int64"))
    assert [(x.tolist(), int(i)) for x, i in dataset.repeat(2)] == [([i, i], i) for i in range(4)] * 2
    assert "from_torch-0: from_torch(Stream)" in dataset.explain()
    check_op(lambda: rd.Dataset.from_torch(Stream()).batch(3))


def test_an_empty_stream_needs_a_signature() -> None:
    with pytest.raises(rd.FailedPreconditionError, match=r"from_torch\(Stream\) is that of its first sample"):
        _ = rd.Dataset.from_torch(Stream(0)).element_spec
    signature = (rd.TensorSpec((None,), "float32"), rd.TensorSpec((), "int64"))
    assert list(rd.Dataset.from_torch(Stream(0), signature)) == []
    assert rd.Dataset.from_torch(Stream(0), signature).element_spec == signature


def test_samples_that_do_not_fit() -> None:
    dataset = rd.Dataset.from_torch(Squares(), {"x": rd.TensorSpec((), "int64"), "name": rd.TensorSpec((), bytes)})
    with pytest.raises(rd.SpecError):
        next(iter(dataset))


def test_no_dataset() -> None:
    with pytest.raises(rd.SpecError, match=r"from_torch needs a dataset with __getitem__.*got 3 \(int\)"):
        rd.Dataset.from_torch(3)


class Growing(IterableDataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        for length in range(self.size):
            yield torch.zeros(2, length), f"n{length}"


def test_samples_may_differ_in_shape() -> None:
    dataset = rd.Dataset.from_torch(Growing(6))
    assert dataset.element_spec == (rd.TensorSpec((2, None), "float32"), rd.TensorSpec((), str))
    assert [tuple(x.shape) for x, _ in dataset] == [(2, length) for length in range(6)]
    assert [list(text) for _, text in dataset.padded_batch(4)] == [["n0", "n1", "n2", "n3"], ["n4", "n5"]]
