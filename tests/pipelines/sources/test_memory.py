from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.dataset import Dataset
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.sources.memory import IndexedIterator, MemoryOp


def test_slices_of_every_leaf() -> None:
    dataset = Dataset.from_tensor_slices({"x": np.arange(6).reshape(3, 2), "y": torch.arange(3), "t": ["a", "b", "c"]})
    assert len(dataset) == 3
    assert dataset.element_spec["x"] == TensorSpec((2,), np.int64)
    last = list(dataset)[-1]
    assert (last["x"].tolist(), int(last["y"]), last["t"]) == ([4, 5], 2, "c")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (3, "got a scalar: 3"),
        (([1], 2), "got a scalar '1': 2"),
        (("text", [1]), "got a scalar '0'"),
        (([1, 2], [1, 2, 3]), r"same first dimension, got \{'0': 2, '1': 3\}"),
        ((), "at least one tensor"),
    ],
)
def test_what_cannot_be_sliced(tensors: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Dataset.from_tensor_slices(tensors)


def test_what_is_no_tensor() -> None:
    with pytest.raises(SpecError, match="rectangular"):
        Dataset.from_tensor_slices([[1], [1, 2]])
    with pytest.raises(SpecError, match="A leaf must be"):
        Dataset.from_tensors({1, 2})


def test_nothing_to_slice() -> None:
    dataset = Dataset.from_tensor_slices(np.zeros((0, 3)))
    assert len(dataset) == 0
    assert list(dataset.batch(2)) == []
    assert dataset.element_spec == TensorSpec((3,), np.float64)


@pytest.mark.parametrize("make", [Dataset.from_tensor_slices, lambda x: Dataset.from_tensors(x).unbatch()])
@pytest.mark.parametrize("copied", [False, True])
def test_what_is_handed_out_is_not_the_source(make: Any, copied: bool) -> None:
    dataset = make(np.zeros((4, 2)))
    if copied:
        dataset = pickle.loads(pickle.dumps(dataset))
    for row in dataset.repeat(2).as_numpy_iterator():
        assert not row.any()
        row[:] = 1


def test_arrays_are_not_copied() -> None:
    source = np.zeros((4, 2))
    dataset = Dataset.from_tensor_slices(source)
    source[3] = 7
    assert list(dataset.as_numpy_iterator())[3].tolist() == [7, 7]


def test_neighbours_are_read_as_by_their_indices_and_marked_as_shared() -> None:
    access = MemoryOp.of_slices({"x": np.arange(9).reshape(9, 1), "y": list("abcdefghi")}).random_access()
    for start, stop in ((0, 9), (2, 5), (8, 9)):
        read, gathered = access.read(start, stop), access.gather(np.arange(start, stop))
        assert read.num_rows == gathered.num_rows == stop - start
        for mine, theirs in zip(read.columns, gathered.columns, strict=True):
            assert (mine == theirs).all()
            assert not mine.flags.writeable


def test_blocks_follow_the_limit_and_the_state_is_the_next_index() -> None:
    access = Dataset.range(10, 15)._op.random_access()
    assert access is not None
    iterator = IndexedIterator(access)
    assert iterator.next_block(2).rows() == [10, 11]
    assert iterator.state_dict() == {"next": 2}
    resumed = IndexedIterator(access)
    resumed.load_state_dict({"next": 2})
    assert resumed.next_block(99).rows() == [12, 13, 14]
    for _ in range(2):
        with pytest.raises(StopIteration):
            resumed.next_block(1)
