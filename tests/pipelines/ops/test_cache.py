from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.ops.cache import CacheOp
from tests.contracts.op import collect, iterate
from tests.pipelines.model import recorder


def counted(size: int) -> tuple[Dataset, list[int]]:
    calls: list[int] = []
    note = recorder(calls)
    return Dataset.range(size).map(note).cache(), calls


def test_one_whole_pass_is_enough() -> None:
    dataset, calls = counted(5)
    assert [int(x) for x in dataset.repeat(3)] == [0, 1, 2, 3, 4] * 3
    assert calls == [0, 1, 2, 3, 4]


def test_epochs_share_it() -> None:
    dataset, calls = counted(5)
    assert [[int(x) for x in dataset] for _ in range(3)] == [[0, 1, 2, 3, 4]] * 3
    assert len(calls) == 5


def test_a_pass_that_is_left_early_is_not_kept() -> None:
    dataset, calls = counted(5)
    assert [int(x) for x in dataset.take(2).repeat(3)] == [0, 1] * 3
    assert calls == [0, 1] * 3


def test_what_is_random_before_it_is_frozen() -> None:
    frozen = Dataset.range(30).shuffle(30).cache()
    assert [int(x) for x in frozen] == [int(x) for x in frozen]
    lively = Dataset.range(30).cache().shuffle(30)
    assert [int(x) for x in lively] != [int(x) for x in lively]


def test_a_pass_with_an_error_is_not_kept() -> None:
    calls: list[int] = []

    def fail(x: Any) -> Any:
        calls.append(int(x))
        return 6 // int(x - 1)

    items = collect(iterate(Dataset.range(3).map(fail).cache().repeat(2)))
    assert [item[0] if isinstance(item, tuple) else int(item) for item in items] == [-6, "ZeroDivisionError", 6] * 2
    assert len(calls) == 6


def test_a_user_cannot_change_what_is_kept() -> None:
    dataset = Dataset.from_tensors(np.zeros(2)).map(lambda x: x + 1).cache()
    for _ in range(2):
        (element,) = dataset
        assert element.tolist() == [1, 1]
        element.fill_(7)


def test_a_copy_begins_empty_and_another_seed_reads_again() -> None:
    dataset, calls = counted(3)
    assert len(list(dataset)) == len(list(pickle.loads(pickle.dumps(dataset)))) == 3
    for seed in (1, 1, 2):
        assert len(list(dataset.with_options(Options(seed=seed)))) == 3
    assert len(calls) == 3 * 3


def test_a_resumed_iterator_fills_it() -> None:
    first, _ = counted(4)
    iterator = iterate(first)
    collect(iterator, 3)
    fresh, calls = counted(4)
    resumed = iterate(fresh)
    resumed.load_state_dict(iterator.state_dict())
    assert [int(x) for x in collect(resumed)] == [3]
    assert calls == [0, 1, 2, 3]
    assert isinstance(fresh._op, CacheOp)
    assert len(collect(iterate(fresh))) == 4
    assert calls == [0, 1, 2, 3]


def test_a_user_cannot_change_ragged_rows_that_are_kept() -> None:
    dataset = Dataset.range(1, 5).map(lambda n: np.full(int(n), n)).cache()
    for _ in range(3):
        rows = list(dataset)
        assert [row.tolist() for row in rows] == [[1], [2, 2], [3, 3, 3], [4, 4, 4, 4]]
        for row in rows:
            row += 1
