from __future__ import annotations

import numpy as np
import pytest

from raydist.core.errors import SpecError
from raydist.core.values import UNKNOWN_CARDINALITY
from raydist.dataset import Dataset
from raydist.pipelines.elements.spec import TensorSpec
from tests.contracts.op import collect, iterate


@pytest.mark.parametrize("values", [[3, 1, 3, 2, 1], ["b", "a", "b", "c", "a"], [b"b", b"a", b"b", b"c", b"a"]])
@pytest.mark.parametrize("batch", [1, 5])
def test_every_value_at_its_first_place(values: list[object], batch: int) -> None:
    dataset = Dataset.from_tensor_slices(values).unique()
    assert [x for group in dataset.batch(batch).as_numpy_iterator() for x in group] == [values[k] for k in (0, 1, 3)]


def test_every_pass_begins_anew() -> None:
    assert [int(x) for x in Dataset.from_tensor_slices([1, 1, 2]).unique().repeat(2)] == [1, 2, 1, 2]


def test_spec_and_cardinality() -> None:
    dataset = Dataset.range(5)
    assert dataset.unique().element_spec == TensorSpec((), "int64")
    assert dataset.repeat().unique().cardinality() == UNKNOWN_CARDINALITY


@pytest.mark.parametrize("values", [[0.5, 1.5], np.zeros((2, 3), np.int64), ([1, 2], [1, 2])])
def test_other_elements_cannot_be_told_apart(values: object) -> None:
    dataset = Dataset.from_tensor_slices(values).unique()
    assert [item[0] for item in collect(iterate(dataset))] == ["SpecError", "SpecError"]
    with pytest.raises(SpecError, match="unique needs elements that are single integers"):
        _ = dataset.element_spec
