from __future__ import annotations

import pytest

from raydist.core.errors import FailedPreconditionError, SpecError
from raydist.core.values import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from raydist.dataset import Dataset
from raydist.pipelines.elements.spec import TensorSpec
from tests.contracts.op import collect, iterate

A, B = Dataset.range(3), Dataset.range(10, 12)


def test_one_after_the_other() -> None:
    assert [int(x) for x in A.concatenate(B)] == [0, 1, 2, 10, 11]
    assert [int(x) for x in A.concatenate(A).repeat(2)] == [0, 1, 2] * 4


def test_cardinality() -> None:
    unknown, endless = A.filter(lambda x: True), A.repeat()
    assert A.concatenate(B).cardinality() == 5
    assert unknown.concatenate(endless).cardinality() == INFINITE_CARDINALITY
    assert endless.concatenate(unknown).cardinality() == INFINITE_CARDINALITY
    assert A.concatenate(unknown).cardinality() == UNKNOWN_CARDINALITY


def test_the_spec_covers_both() -> None:
    rows = Dataset.from_tensor_slices([[1, 2], [3, 4]])
    longer = Dataset.from_tensor_slices([[1, 2, 3]])
    assert rows.concatenate(longer).element_spec == TensorSpec((None,), "int64")
    assert [len(x) for x in rows.concatenate(longer)] == [2, 2, 3]


def test_other_elements_are_errors_in_their_places() -> None:
    texts = Dataset.from_tensor_slices(["a", "b"])
    mixed = A.concatenate(texts).concatenate(B)
    items = collect(iterate(mixed))
    assert [item[0] if isinstance(item, tuple) else int(item) for item in items] == [
        *(0, 1, 2, "SpecError", "SpecError", 10, 11)
    ]
    assert "int64, and now * of str" in items[3][1]
    with pytest.raises(SpecError, match="one structure and dtype"):
        _ = mixed.element_spec
    with pytest.raises(SpecError, match="one structure and dtype"):
        _ = A.concatenate(Dataset.zip(A, B)).element_spec


def test_only_datasets() -> None:
    with pytest.raises(TypeError, match="concatenate takes a Dataset, got \\[1, 2\\]"):
        A.concatenate([1, 2])  # type: ignore[arg-type]  # the point of this test


def test_a_part_without_elements_need_not_tell_what_they_are() -> None:
    nothing = Dataset.range(3).filter(lambda x: False).map(lambda x: x * 2)
    for dataset in (Dataset.range(3).concatenate(nothing), nothing.concatenate(Dataset.range(3))):
        assert dataset.element_spec == TensorSpec((), "int64")
        assert dataset.batch(2).element_spec == TensorSpec((None,), "int64")
        assert collect(iterate(dataset)) == [0, 1, 2]
    with pytest.raises(FailedPreconditionError, match="element_spec"):
        _ = nothing.concatenate(nothing).element_spec
