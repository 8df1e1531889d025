from __future__ import annotations

import numpy as np
import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.core.values import UNKNOWN_CARDINALITY
from raydist.dataset import Dataset
from tests.contracts.op import collect, iterate


def test_ends_with_the_first_refusal() -> None:
    assert [int(x) for x in Dataset.range(10).take_while(lambda x: x % 4 != 3)] == [0, 1, 2]
    assert [int(x) for x in Dataset.range(3).take_while(lambda x: True)] == [0, 1, 2]
    assert not list(Dataset.range(3).take_while(lambda x: False))
    pairs = Dataset.zip(Dataset.range(5), Dataset.range(5)).take_while(lambda a, b: a + b < 5)
    assert len(list(pairs)) == 3


def test_an_endless_dataset_ends() -> None:
    dataset = Dataset.range(5).repeat().enumerate().take_while(lambda number, x: number < 7)
    assert [int(x) for _, x in dataset] == [0, 1, 2, 3, 4, 0, 1]


def test_errors_keep_their_places_and_end_nothing() -> None:
    items = collect(iterate(Dataset.range(9).take_while(lambda x: 6 // int(x - 2) != 2)))
    assert [item[0] if isinstance(item, tuple) else int(item) for item in items] == [0, 1, "ZeroDivisionError", 3, 4]
    iterator = iterate(Dataset.range(9).take_while(lambda x: bool(1 // int(x - 1) < 5)))
    next(iterator)
    with pytest.raises(ZeroDivisionError) as caught:
        next(iterator)
    assert "element 1 of its input" in caught.value.__notes__[0]


@pytest.mark.parametrize("answer", [1, None, np.array([True])])
def test_the_predicate_must_return_one_bool(answer: object) -> None:
    items = collect(iterate(Dataset.range(2).take_while(lambda x: answer)))
    assert [item[0] for item in items] == ["SpecError", "SpecError"]


def test_cardinality_and_bad_argument() -> None:
    assert Dataset.range(5).repeat().take_while(lambda x: True).cardinality() == UNKNOWN_CARDINALITY
    with pytest.raises(InvalidArgumentError, match="take_while needs a function, got 3"):
        Dataset.range(5).take_while(3)  # type: ignore[arg-type]  # the point of this test
