from __future__ import annotations

import json
import pickle
import sys

import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.dataset import Dataset


def chain(count: int) -> Dataset:
    dataset = Dataset.range(3)
    for _ in range(count - 1):
        dataset = dataset.take(5)
    return dataset


def test_as_many_as_may_follow_each_other_work() -> None:
    dataset = chain(200)
    assert dataset._op.chain_length == 200
    assert [int(x) for x in dataset] == [0, 1, 2]
    assert pickle.loads(pickle.dumps(dataset))._op.chain_length == 200
    iterator = iter(dataset)
    next(iterator)
    resumed = iter(dataset)
    resumed.load_state_dict(json.loads(json.dumps(iterator.state_dict())))
    assert [int(x) for x in resumed] == [1, 2]
    assert "take-199" in dataset.explain()


def test_one_more_says_how_many_may() -> None:
    most = sys.getrecursionlimit() // 4
    with pytest.raises(InvalidArgumentError, match=rf"At most {most} operations may follow.*got {most + 1} with take"):
        chain(800)
    assert chain(most)._op.chain_length == most
    parts = [Dataset.range(1).map(lambda x: x) for _ in range(300)]
    with pytest.raises(InvalidArgumentError, match="concatenate parts in pairs"):
        Dataset.range(0).apply(lambda ds: [ds := ds.concatenate(part) for part in parts][-1])


def test_what_stands_side_by_side_is_not_counted() -> None:
    parts = [Dataset.range(1) for _ in range(512)]
    while len(parts) > 1:
        parts = [first.concatenate(second) for first, second in zip(parts[::2], parts[1::2], strict=True)]
    assert parts[0]._op.chain_length == 10
    assert len(list(parts[0])) == 512


def test_an_operation_that_needs_more_of_the_stack_says_so() -> None:
    dataset = Dataset.range(3)
    for _ in range(200):
        dataset = dataset.interleave(lambda x: Dataset.from_tensors(x))
    with pytest.raises(RecursionError) as caught:
        list(dataset)
    assert any("201 operations follow each other" in note for note in caught.value.__notes__)


def test_a_functions_own_recursion_is_left_alone() -> None:
    def endless(x: int) -> int:
        return endless(x)

    with pytest.raises(RecursionError) as caught:
        list(Dataset.range(3).map(endless))
    assert not any("follow each other" in note for note in caught.value.__notes__)
