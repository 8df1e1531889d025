from __future__ import annotations

import numpy as np
import pytest
import torch

from raydist.core.errors import InvalidArgumentError
from raydist.core.values import UNKNOWN_CARDINALITY
from raydist.dataset import Dataset
from tests.contracts.op import collect, iterate


def test_keeps_what_the_predicate_accepts() -> None:
    dataset = Dataset.from_tensor_slices(([1, 2, 3], ["a", "b", "c"])).filter(lambda number, text: text != "b")
    assert [(int(n), t) for n, t in dataset] == [(1, "a"), (3, "c")]
    assert [int(x) for x in Dataset.range(5).filter(lambda x: torch.tensor(bool(x > 2)))] == [3, 4]


@pytest.mark.parametrize("answer", [1, None, "yes", np.array([True]), np.float32(1)])
def test_the_predicate_must_return_one_bool(answer: object) -> None:
    items = collect(iterate(Dataset.range(3).filter(lambda x: answer if x == 1 else True)))
    assert items[0] == 0
    assert items[1][0] == "SpecError"
    assert "must return one bool, got" in items[1][1]
    assert items[2] == 2


def test_an_error_of_the_predicate_stands_in_its_place() -> None:
    items = collect(iterate(Dataset.range(5).filter(lambda x: 6 // int(x) > 1)))
    assert items[0] == ("ZeroDivisionError", "integer division or modulo by zero")
    assert [int(x) for x in items[1:]] == [1, 2, 3]


def test_the_predicate_cannot_change_the_element() -> None:
    dataset = Dataset.from_tensor_slices(np.ones((2, 2))).map(lambda row: row + 1)
    items = collect(iterate(dataset.filter(lambda row: bool(row.fill(0)) or True)))
    assert [item.tolist() for item in items] == [[2, 2], [2, 2]]


def test_cardinality_and_bad_argument() -> None:
    assert Dataset.range(5).filter(lambda x: True).cardinality() == UNKNOWN_CARDINALITY
    with pytest.raises(InvalidArgumentError, match="filter needs a function"):
        Dataset.range(5).filter(None)  # type: ignore[arg-type]  # the point of this test
