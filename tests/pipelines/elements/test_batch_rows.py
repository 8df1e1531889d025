from __future__ import annotations

import numpy as np
import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.pipelines.elements.batch_rows import row_spec, rows_of_batch
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.elements.spec import TensorSpec


def test_the_rows_of_one_element_are_a_block() -> None:
    rows = rows_of_batch(block_of_rows([(np.arange(6).reshape(3, 2), np.array(["a", "b", "c"], object))]))
    assert [(x.tolist(), text) for x, text in rows.rows()] == [([0, 1], "a"), ([2, 3], "b"), ([4, 5], "c")]


def test_leaves_of_different_length_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="must share their first dimension, got shapes"):
        rows_of_batch(block_of_rows([(np.arange(3), np.arange(4))]))


def test_a_row_loses_the_first_dimension() -> None:
    assert row_spec(TensorSpec((None, 2), "int64")) == TensorSpec((2,), "int64")
    with pytest.raises(InvalidArgumentError, match="first dimension to split"):
        row_spec(TensorSpec((), "int64"))
