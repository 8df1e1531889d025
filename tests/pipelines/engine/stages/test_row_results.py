"""A block done row by row is the block done at once."""

from __future__ import annotations

from typing import Any

import pytest

from raydist.dataset import Dataset
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import StageResult
from raydist.pipelines.engine.kernel import run_stage
from raydist.pipelines.engine.stages.row_results import join_results
from tests.pipelines.engine.toy_stages import SOURCE, block_of, divide, spec_of


def shape_of(result: StageResult) -> list[Any]:
    """Elements, and errors as their place and kind."""
    shapes: list[Any] = []
    for item in result.items:
        rows = item.rows() if isinstance(item, Block) else [(item.kernel, item.index, type(item.error).__name__)]
        shapes.extend(rows)
    return shapes


@pytest.mark.parametrize(
    "dataset",
    [
        SOURCE.map(divide),
        SOURCE.filter(lambda x: x % 2 == 0).map(lambda x: 6 // int(x - 4)).map(lambda x: x + 1),
        SOURCE.map(lambda x: x if x < 3 else float(x)),
        SOURCE.filter(lambda x: False),
    ],
)
def test_rows_joined_are_the_block(dataset: Dataset) -> None:
    spec, block = spec_of(dataset), block_of(SOURCE)
    starts = tuple(range(100, 100 * len(spec.kernels) + 100, 100))
    rows = [
        run_stage(spec, block.slice(row, row + 1), tuple(start + row for start in starts))
        for row in range(block.num_rows)
    ]
    whole, joined = run_stage(spec, block, starts), join_results(spec, rows)
    assert [error[::2] if isinstance(error, tuple) else error for error in shape_of(joined)] == [
        error[::2] if isinstance(error, tuple) else error for error in shape_of(whole)
    ]
    known = [item for item in shape_of(whole) if isinstance(item, tuple) and item[1] is not None]
    assert [item for item in shape_of(joined) if isinstance(item, tuple) and item[1] is not None] == known
    assert (joined.inputs, joined.signatures) == (whole.inputs, whole.signatures)
