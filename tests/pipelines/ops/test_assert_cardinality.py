from __future__ import annotations

import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.core.values import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from raydist.dataset import Dataset
from tests.contracts.op import collect, iterate

FIVE = Dataset.range(5).filter(lambda x: True)


def test_the_right_number() -> None:
    assert len(FIVE.assert_cardinality(5)) == 5
    assert [int(x) for x in FIVE.assert_cardinality(5)] == [0, 1, 2, 3, 4]


def test_too_few() -> None:
    items = collect(iterate(FIVE.take(3).assert_cardinality(5)))
    assert [int(item) for item in items[:3]] == [0, 1, 2]
    assert items[3][0] == "FailedPreconditionError"
    assert "must have 5 elements" in items[3][1]
    assert "contained only 3" in items[3][1]
    assert len(items) == 4


@pytest.mark.parametrize("size", [6, 20])
def test_too_many(size: int) -> None:
    items = collect(iterate(Dataset.range(size).assert_cardinality(5)))
    assert [int(item) for item in items[:5]] == [0, 1, 2, 3, 4]
    assert "contained at least 6" in items[5][1]
    assert len(items) == 6


def test_infinite_and_unknown() -> None:
    endless = FIVE.repeat().assert_cardinality(INFINITE_CARDINALITY)
    assert endless.cardinality() == INFINITE_CARDINALITY
    assert len(collect(iterate(endless), 12)) == 12
    assert "infinitely many" in collect(iterate(FIVE.assert_cardinality(INFINITE_CARDINALITY)))[5][1]
    assert FIVE.assert_cardinality(5).assert_cardinality(UNKNOWN_CARDINALITY).cardinality() == UNKNOWN_CARDINALITY


def test_bad_arguments() -> None:
    with pytest.raises(InvalidArgumentError, match="expected_cardinality must be >= 0, .* got -3"):
        FIVE.assert_cardinality(-3)
