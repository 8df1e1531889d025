from __future__ import annotations

import numpy as np
import pytest

from raydist.core.errors import SpecError
from raydist.pipelines.elements.row_buffer import RowBuffer
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.ops.shuffle import sources_of_outputs


def filled() -> RowBuffer:
    slots = RowBuffer()
    slots.append(block_of_rows([(0, "a"), (1, "b")]))
    slots.append(block_of_rows([(2, "c")]))
    return slots


def test_exchange_hands_out_what_was_last_put_in() -> None:
    slots = filled()
    drawn = np.array([1, 1, 0])
    out = slots.exchange(block_of_rows([(3, "d"), (4, "e"), (5, "f")]), drawn, *sources_of_outputs(drawn))
    assert out.rows() == [(1, "b"), (3, "d"), (0, "a")]
    assert slots.take(np.arange(3)).rows() == [(5, "f"), (4, "e"), (2, "c")]


def test_rows_of_differing_shape_fit() -> None:
    slots = RowBuffer()
    slots.append(block_of_rows([np.zeros(2), np.ones(2)]))
    drawn = np.array([0])
    assert slots.exchange(block_of_rows([np.zeros(3)]), drawn, *sources_of_outputs(drawn)).rows()[0].shape == (2,)
    assert [row.shape for row in slots.take(np.arange(2)).rows()] == [(3,), (2,)]


def test_what_was_put_in_is_not_written() -> None:
    block = block_of_rows([1, 2])
    slots = RowBuffer()
    slots.append(block)
    drawn = np.array([0, 1])
    slots.exchange(block_of_rows([8, 9]), drawn, *sources_of_outputs(drawn))
    assert block.rows() == [1, 2]


def test_another_dtype_is_an_error() -> None:
    drawn = np.array([0])
    with pytest.raises(SpecError, match="one dtype of '0'"):
        filled().exchange(block_of_rows([(1.5, "a")]), drawn, *sources_of_outputs(drawn))
