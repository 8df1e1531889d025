from __future__ import annotations

import pytest

from raydist.core.values import UNKNOWN_CARDINALITY
from raydist.dataset import Dataset
from tests.pipelines.model import recorder


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (2, 2), (9, 5), (-1, 5), (-9, 5)])
def test_first_elements(count: int, expected: int) -> None:
    dataset = Dataset.range(5).take(count)
    assert [int(x) for x in dataset] == list(range(expected))
    assert dataset.cardinality() == expected


def test_nothing_is_read_beyond_the_last_element() -> None:
    calls: list[int] = []
    assert len(list(Dataset.range(100).map(recorder(calls)).take(7))) == 7
    assert calls == list(range(7))


def test_cardinality_of_other_inputs() -> None:
    assert Dataset.range(5).repeat().take(2).cardinality() == 2
    assert Dataset.range(5).filter(lambda x: True).take(2).cardinality() == UNKNOWN_CARDINALITY
    assert Dataset.range(5).filter(lambda x: True).take(0).cardinality() == 0
