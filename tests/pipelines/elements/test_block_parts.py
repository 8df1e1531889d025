from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.pipelines.elements.block_parts import BlockInParts, rows_together
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError, Item
from raydist.pipelines.elements.rows import block_of_rows, items_of_rows


def seen(items: list[Item]) -> list[Any]:
    """What a consumer sees of each element."""
    rows = [[item] if isinstance(item, ElementError) else item.rows() for item in items]
    return [shown(row) for block in rows for row in block]


def shown(row: Any) -> Any:
    if isinstance(row, ElementError):
        return str(row.error)
    return tuple(map(shown, row)) if isinstance(row, tuple) else (type(row).__name__, np.asarray(row).tolist())


ARRAYS = st.sampled_from([np.arange(3), np.arange(4), np.ones(3, np.float32), np.ones((2, 2))])
PLAIN = st.integers(-9, 9) | st.floats(width=32, allow_nan=False) | st.text(max_size=3) | st.booleans() | ARRAYS
VALUES = PLAIN | st.tuples(PLAIN, PLAIN) | st.just(object())  # the last can be no element


@given(st.lists(st.lists(VALUES, min_size=1, max_size=4), max_size=6))
def test_parts_of_any_kind_are_the_elements_that_they_were(parts: list[list[Any]]) -> None:
    whole = BlockInParts(sum(map(len, parts)))
    expected: list[Item] = []
    for part in parts:
        whole.add(items_of_rows(part))
        expected += items_of_rows(part)
    assert seen(whole.items()) == seen(expected)


def test_dense_parts_of_one_kind_are_one_block() -> None:
    whole = BlockInParts(6)
    for first in (0, 2, 4):
        part = block_of_rows([(np.full(3, first), 0.5), (np.full(3, first + 1), 1.5)])
        whole.add([part])
        part.columns[0][:] = -1  # its memory is used again
    (block,) = whole.items()
    assert isinstance(block, Block)
    assert block.columns[0].tolist() == [[n, n, n] for n in range(6)]
    assert block.columns[1].tolist() == [0.5, 1.5] * 3
    assert (block.num_rows, block.columns[0].base) == (6, None), "and has no memory beyond them"


def test_an_error_stands_between_what_came_before_and_after() -> None:
    whole = BlockInParts(8)
    error = ElementError(ValueError("no"), 2)
    whole.add([block_of_rows([0, 1]), error, block_of_rows([3])])
    whole.add([block_of_rows([4, 5])])
    whole.add([block_of_rows([6, 7])])
    items = whole.items()
    assert seen(items) == [("int64", 0), ("int64", 1), "no", ("int64", 3), *(("int64", n) for n in range(4, 8))]
    assert isinstance(items[-1], Block)
    assert (items[-1].num_rows, items[-1].columns[0].base) == (4, None), "and has no memory beyond them"


@pytest.mark.parametrize(
    ("result", "rows"),
    [
        (np.zeros((28, 28), np.float32), 167),
        ((np.zeros(1 << 10, np.uint8), 7), 508),
        (np.zeros(1 << 20, np.uint8), 1),
        (1.5, 1 << 17),
        (b"a file", sys.maxsize),
        (object(), sys.maxsize),
    ],
)
def test_a_part_is_what_the_cache_holds(result: Any, rows: int) -> None:
    assert rows_together(result) == rows
