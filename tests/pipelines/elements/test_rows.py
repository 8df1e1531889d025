from __future__ import annotations

import dataclasses
from collections import namedtuple
from typing import Any

import numpy as np
import pytest

from raydist.core.errors import SpecError
from raydist.core.nest import flatten
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError
from raydist.pipelines.elements.rows import block_of_rows, items_of_rows
from raydist.pipelines.elements.spec import TensorSpec

Point = namedtuple("Point", ["x", "y"])


@dataclasses.dataclass(frozen=True)
class Box:
    low: Any
    high: Any


@pytest.mark.parametrize(
    "rows",
    [
        [1, 2],
        [(1, (2.0, "a")), (2, (3.0, "b"))],
        [{"b": 1, "a": 2}, {"a": 3, "b": 4}],
        [Point(1, 2), Point(3, 4)],
        [Box(1, (2, b"x")), Box(3, (4, b"y"))],
    ],
)
def test_structure_and_leaf_order_are_those_of_flatten(rows: list[Any]) -> None:
    block = block_of_rows(rows)
    leaves, structure = flatten(rows[0])
    assert block.structure == structure
    assert [column[0] for column in block.columns] == leaves


def test_dense_and_ragged_columns() -> None:
    dense = block_of_rows([np.zeros((2, 3)), np.ones((2, 3))])
    assert dense.columns[0].shape == (2, 2, 3)
    ragged = block_of_rows([np.zeros((2, 3)), np.ones((2, 4))])
    assert ragged.columns[0].dtype == object
    assert ragged.specs == (TensorSpec((2, None), np.float64),)
    assert block_of_rows([np.zeros(2), np.zeros((2, 2))]).specs[0].shape is None
    assert block_of_rows([["a"], ["b", "c"]]).specs == (TensorSpec((None,), "U"),)


def test_a_zero_dimensional_array_is_a_scalar() -> None:
    block = block_of_rows([np.array(1.5), np.float64(2.5)])
    assert block.columns[0].tolist() == [1.5, 2.5]


def test_neighbours_of_one_kind_share_a_block() -> None:
    items = items_of_rows([1, 2, "a", 3.5, None, 4.5, (1,)])
    assert [item.num_rows if isinstance(item, Block) else item.index for item in items] == [2, 1, 1, 4, 1, 1]
    assert isinstance(items[3], ElementError)


@pytest.mark.parametrize("rows", [[1, "a"], [(1, 2), (1, 2, 3)], [{"a": 1}, {"b": 1}], [Point(1, 2), (1, 2)]])
def test_rows_that_must_agree_show_both(rows: list[Any]) -> None:
    with pytest.raises(SpecError, match="All elements must have one"):
        block_of_rows(rows)
