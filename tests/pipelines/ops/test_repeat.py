from __future__ import annotations

import itertools

import pytest

from raydist.core.values import INFINITE_CARDINALITY
from raydist.dataset import Dataset
from tests.pipelines.model import recorder


@pytest.mark.parametrize(("count", "expected"), [(0, []), (1, [0, 1]), (3, [0, 1] * 3)])
def test_passes(count: int, expected: list[int]) -> None:
    dataset = Dataset.range(2).repeat(count)
    assert [int(x) for x in dataset] == expected
    assert dataset.cardinality() == len(expected)


@pytest.mark.parametrize("count", [None, -1, -7])
def test_for_ever(count: int | None) -> None:
    dataset = Dataset.range(2).repeat(count)
    assert [int(x) for x in dataset.take(5)] == [0, 1, 0, 1, 0]
    assert dataset.cardinality() == INFINITE_CARDINALITY


@pytest.mark.parametrize("count", [None, 5])
def test_an_empty_dataset_ends(count: int | None) -> None:
    assert list(Dataset.range(0).repeat(count)) == []
    assert list(Dataset.range(4).filter(lambda x: False).repeat(count)) == []
    assert Dataset.range(0).repeat(count).cardinality() == 0


def test_functions_run_again_in_every_pass() -> None:
    calls: list[int] = []
    assert len(list(Dataset.range(3).map(recorder(calls)).repeat(2))) == 6
    assert len(calls) == 6


def test_of_so_many_passes_each_may_give_something() -> None:
    num_asked = itertools.count()
    some = Dataset.range(1).filter(lambda _: next(num_asked) % 3 == 2)
    assert [int(x) for x in some.repeat(9)] == [0, 0, 0]
    assert list(some.repeat()) == []  # the first pass of one for ever gives nothing
