from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raydist.core.errors import SpecError
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.ops.padded_batch import Padding


@pytest.mark.parametrize(("dtype", "value"), [("float64", 2), ("float32", 0.5), ("uint8", 7), ("bool", True)])
def test_python_numbers_fill_what_they_fit(dtype: str, value: Any) -> None:
    rows = block_of_rows([np.ones(1, dtype), np.ones(2, dtype)])
    padded = Padding(values=value).batch(rows)
    assert padded.columns[0].dtype == dtype
    assert padded.columns[0][0, 0].tolist() == [1, value]
    assert padded.specs == (TensorSpec((2, 2), dtype),)


def test_scalars_need_no_padding() -> None:
    padded = Padding().batch(block_of_rows([(1, "a"), (2, "b")]))
    assert [column.tolist() for column in padded.columns] == [[[1, 2]], [["a", "b"]]]


@pytest.mark.parametrize(("dtype", "value"), [("uint8", -1), ("uint8", 300), ("int8", 128), ("int32", 0.5)])
def test_python_numbers_that_do_not_fit_are_told(dtype: str, value: Any) -> None:
    rows = block_of_rows([np.ones(1, dtype), np.ones(2, dtype)])
    with pytest.raises(SpecError, match=rf"must be one scalar of {dtype}, got {value}"):
        Padding(values=value).batch(rows)
