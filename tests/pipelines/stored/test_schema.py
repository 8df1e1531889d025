from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raydist.errors import SpecError
from raydist.pipelines.elements.blocks import Block, object_column
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.stored.schema import BlockSchema, block_of_batch
from tests.contracts.op import same


def rows(*values: Any) -> Block:
    return block_of_rows(list(values))


@pytest.mark.parametrize(
    "blocks",
    [
        [rows(np.zeros(2), np.ones(2)), rows(np.zeros(3))],
        [rows(np.zeros(2), np.ones(3)), rows(np.zeros(2), np.ones(2))],
        [rows(np.zeros((0, 2)))],
        [rows((1, "a")), rows((2, ""))],
        [rows(np.array(["a", "b"], object)), rows(np.array([], object).reshape(0))],
    ],
)
def test_what_is_laid_out_comes_back(blocks: list[Block]) -> None:
    schema = BlockSchema()
    found = [block_of_batch(schema.batch(block), block.structure) for block in blocks]
    for mine, theirs in zip(found, blocks, strict=True):
        assert same(mine.rows(), theirs.rows())


def test_a_leaf_that_had_two_shapes_has_one_schema_from_then_on() -> None:
    schema = BlockSchema()
    schemas = [schema.batch(rows(np.zeros(size))).schema for size in (2, 2, 3, 2, 5)]
    assert schemas[0] == schemas[1]
    assert schemas[1] != schemas[2]
    assert schemas[2] == schemas[3] == schemas[4]


def test_columns_are_dense_again() -> None:
    schema = BlockSchema()
    schema.batch(rows(np.zeros(2), np.zeros(3)))
    block = block_of_batch(schema.batch(rows(np.zeros(2), np.ones(2))), rows(1).structure)
    assert block.columns[0].tolist() == [[0, 0], [1, 1]]
    assert block.columns[0].dtype == np.float64


def test_other_elements() -> None:
    schema = BlockSchema()
    schema.batch(rows(1))
    with pytest.raises(SpecError, match="one structure and dtype"):
        schema.batch(rows(1.0))


def test_scalars_beside_arrays() -> None:
    schema = BlockSchema()
    schema.batch(rows(1))
    schema.batch(rows(np.zeros(2, np.int64)))
    with pytest.raises(SpecError, match="one rank"):
        schema.batch(rows(2))
    text = object_column(["a", np.array(["b"], object)])
    with pytest.raises(SpecError, match="one rank"):
        BlockSchema().batch(Block(rows("a").structure, rows("a").specs, (text,), 2))
