from __future__ import annotations

import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.dataset import Dataset
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.ops.map import split_label


def test_a_dict_becomes_features_and_label() -> None:
    ds = Dataset.from_tensor_slices({"b": [1, 2], "a": [3.0, 4.0], "y": ["x", "z"]})
    split = Dataset(split_label(ds._op, "y"))
    assert split.element_spec == ({"a": TensorSpec(()), "b": TensorSpec((), "int64")}, TensorSpec((), "U"))
    assert list(split.as_numpy_iterator()) == [({"a": 3.0, "b": 1}, "x"), ({"a": 4.0, "b": 2}, "z")]


@pytest.mark.parametrize("columns", [["a", "b"], ["y"]])
def test_there_is_a_label_and_something_else(columns: list[str]) -> None:
    ds = Dataset.from_tensor_slices({name: [1] for name in columns})
    with pytest.raises(InvalidArgumentError, match=f"one of several columns, got 'y' and the columns {columns[0]}"):
        split_label(ds._op, "y")
