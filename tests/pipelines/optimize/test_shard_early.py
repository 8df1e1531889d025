from __future__ import annotations

import numpy as np

from raydist.dataset import Dataset
from tests.contracts.op import collect, iterate
from tests.pipelines.optimize.rewriting import assert_same, optimised_names


def noisy(x: np.int64, *, rng: np.random.Generator) -> float:
    return float(x) + float(rng.random())


def bad(x: np.int64) -> int:
    return 12 // int(x % 4 - 2)


def test_the_function_is_called_for_one_shard() -> None:
    calls: list[int] = []

    def note(x: np.int64) -> np.int64:
        calls.append(int(x))
        return x

    dataset = Dataset.range(9).map(lambda x: x).map(note).shard(3, 1)
    assert optimised_names(dataset) == ["range", "shard", "map", "map"]
    assert [int(x) for x in dataset] == calls == [1, 4, 7]


def test_errors_stay_in_their_shards() -> None:
    dataset = Dataset.range(12).map(bad).shard(2, 0)
    items = assert_same(dataset, "shard_pushdown")
    assert [type(item).__name__ for item in items] == ["int64", "tuple"] * 3


def test_what_depends_on_numbers_of_elements_stays() -> None:
    in_order = Dataset.range(9).map(abs, num_parallel_calls=1)
    for dataset in (Dataset.range(9).map(noisy), in_order, Dataset.range(9).filter(lambda x: x > 3)):
        assert optimised_names(dataset.shard(2, 1))[-1] == "shard"
        assert_same(dataset.shard(2, 1), "shard_pushdown")


def test_shards_of_shards() -> None:
    dataset = Dataset.range(20).map(lambda x: x + 1).shard(2, 1).map(lambda x: x * 2).shard(3, 0)
    assert optimised_names(dataset) == ["range", "shard", "shard", "map", "map"]
    assert [int(x) for x in collect(iterate(dataset))] == [4, 16, 28, 40]
