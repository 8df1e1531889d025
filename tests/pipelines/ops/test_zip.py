from __future__ import annotations

import pytest

from raydist.core.values import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from raydist.dataset import Dataset
from raydist.pipelines.elements.spec import TensorSpec
from tests.contracts.op import collect, iterate

A, B = Dataset.range(5), Dataset.range(10, 13)


def test_ends_with_the_shortest() -> None:
    expected = [(0, 10), (1, 11), (2, 12)]
    assert [(int(a), int(b)) for a, b in Dataset.zip(A, B)] == expected
    assert [(int(a), int(b)) for a, b in Dataset.zip((A, B))] == expected
    assert Dataset.zip(A, B).cardinality() == 3


def test_nests() -> None:
    dataset = Dataset.zip({"a": A, "rest": (B, Dataset.zip(A, B))})
    first = next(iter(dataset))
    assert int(first["rest"][1][1]) == 10
    assert dataset.element_spec["rest"][1] == (TensorSpec((), "int64"), TensorSpec((), "int64"))


def test_an_error_takes_one_place_of_all() -> None:
    items = collect(iterate(Dataset.zip(A.map(lambda x: 4 // int(x - 1)), B)))
    assert [item[0] for item in items] == [-4, "ZeroDivisionError", 4]
    assert [int(item[1]) for item in items[::2]] == [10, 12]


@pytest.mark.parametrize("args", [(), ([A, B],), (A, 3), ((),)])
def test_only_datasets_can_be_zipped(args: tuple[object, ...]) -> None:
    with pytest.raises(TypeError, match="zip takes datasets"):
        Dataset.zip(*args)


def test_cardinality() -> None:
    unknown = A.filter(lambda x: True)
    assert Dataset.zip(A, B.repeat()).cardinality() == 5
    assert Dataset.zip(A.repeat(), B.repeat()).cardinality() == INFINITE_CARDINALITY
    assert Dataset.zip(A, unknown).cardinality() == UNKNOWN_CARDINALITY
