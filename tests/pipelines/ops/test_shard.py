from __future__ import annotations

import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.core.values import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from raydist.dataset import Dataset
from tests.contracts.op import collect, iterate


@pytest.mark.parametrize(("size", "num_shards"), [(10, 3), (9, 3), (2, 5), (0, 2), (7, 1), (20_000, 7)])
def test_shards_hold_every_element_once(size: int, num_shards: int) -> None:
    for index in range(num_shards):
        shard = Dataset.range(size).shard(num_shards, index)
        assert [int(x) for x in shard] == list(range(index, size, num_shards))
        assert shard.cardinality() == len(range(index, size, num_shards))


def test_shards_compose() -> None:
    assert [int(x) for x in Dataset.range(20).shard(2, 1).shard(3, 2)] == [5, 11, 17]


def test_cardinality_of_other_inputs() -> None:
    assert Dataset.range(5).repeat().shard(3, 0).cardinality() == INFINITE_CARDINALITY
    assert Dataset.range(5).filter(lambda x: True).shard(3, 0).cardinality() == UNKNOWN_CARDINALITY


def test_an_error_comes_out_of_one_shard() -> None:
    dataset = Dataset.range(6).map(lambda x: 12 // int(x - 2))
    shards = [collect(iterate(dataset.shard(2, index))) for index in range(2)]
    assert [item if isinstance(item, tuple) else int(item) for item in shards[0]] == [
        *(-6, ("ZeroDivisionError", "integer division or modulo by zero"), 6)
    ]
    assert [int(item) for item in shards[1]] == [-12, 12, 4]


@pytest.mark.parametrize(("num_shards", "index"), [(0, 0), (-1, 0), (3, 3), (3, -1)])
def test_bad_arguments(num_shards: int, index: int) -> None:
    with pytest.raises(InvalidArgumentError, match="must be"):
        Dataset.range(5).shard(num_shards, index)
