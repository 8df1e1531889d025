from __future__ import annotations

import pytest

from raydist.core.values import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from raydist.dataset import Dataset


@pytest.mark.parametrize(("count", "expected"), [(0, [0, 1, 2]), (2, [2]), (3, []), (9, []), (-1, []), (-5, [])])
def test_other_elements(count: int, expected: list[int]) -> None:
    dataset = Dataset.range(3).skip(count)
    assert [int(x) for x in dataset] == expected
    assert dataset.cardinality() == len(expected)


def test_more_than_a_block_is_skipped() -> None:
    assert [int(x) for x in Dataset.range(5000).skip(4998)] == [4998, 4999]


def test_cardinality_of_other_inputs() -> None:
    assert Dataset.range(5).repeat().skip(2).cardinality() == INFINITE_CARDINALITY
    assert Dataset.range(5).filter(lambda x: True).skip(2).cardinality() == UNKNOWN_CARDINALITY
