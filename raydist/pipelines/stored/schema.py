"""Conversion of blocks to record batches of one schema, as far as possible.

A column may be dense in one block and not in the next. A leaf that has had two shapes is stored as "values and shape"
from then on.
"""

from __future__ import annotations

from typing import Any, final

import numpy as np
import pyarrow as pa

from raydist.errors import SpecError
from raydist.nest import Structure
from raydist.pipelines.elements.arrow import block_of_arrow, block_to_arrow
from raydist.pipelines.elements.blocks import Block, Column, object_column
from raydist.pipelines.elements.rows import stack_leaves

__all__ = ["BlockSchema", "block_of_batch"]

_RAGGED = "ragged"
_RANKS = "Elements that are kept in files must have one rank in each leaf, got {}. Map them to arrays of one rank."


@final
class BlockSchema:
    """The layout of the leaves of stored elements, which adapts to the blocks."""

    def __init__(self) -> None:
        self._signature = ""
        self._kinds: list[Any] = []

    def batch(self, block: Block) -> pa.RecordBatch:
        """Return the block as a record batch, with the schema of the previous batch if shapes allow that.

        Raises:
            SpecError: Structure or dtypes differ from the first block.
        """
        block = block.of_tensors("what is kept in files")
        if not self._signature:
            self._signature = block.signature
            self._kinds = [_kind(column) for column in block.columns]
        if block.signature != self._signature:
            raise SpecError(
                f"All elements must have one structure and dtype, got {self._signature} and then {block.signature}."
            )
        for number, column in enumerate(block.columns):
            if _kind(column) != self._kinds[number]:
                self._kinds[number] = _RAGGED
        columns = [
            _as_ragged(column) if kind == _RAGGED else column
            for column, kind in zip(block.columns, self._kinds, strict=True)
        ]
        return block_to_arrow(Block(block.structure, block.specs, tuple(columns), block.num_rows))


def _kind(column: Column) -> Any:
    """Return the shape of the leaves if they share one, else "ragged"."""
    if column.dtype != object or column.ndim > 1:
        return _RAGGED if 0 in column.shape[1:] else column.shape[1:]  # Parquet has no lists of size 0
    kinds = set(map(type, column))
    if np.ndarray in kinds and len(kinds) > 1:
        raise SpecError(_RANKS.format("scalars and arrays"))
    return _RAGGED if np.ndarray in kinds else ()


def _as_ragged(column: Column) -> Column:
    if column.dtype == object and column.ndim == 1:
        if not isinstance(column[0], np.ndarray):
            raise SpecError(_RANKS.format("text and arrays"))
        return column
    if column.ndim == 1:
        raise SpecError(_RANKS.format("scalars and arrays"))
    return object_column(list(column))


def block_of_batch(batch: pa.RecordBatch, structure: Structure) -> Block:
    """Return the block from which a BlockSchema made a batch; columns are dense if their leaves share a shape."""
    block = block_of_arrow(batch, structure)
    columns, specs = list(block.columns), list(block.specs)
    for number, column in enumerate(columns):
        if column.dtype == object and column.ndim == 1 and isinstance(column[0], np.ndarray):
            columns[number], specs[number] = stack_leaves(list(column), {np.ndarray})
    return Block(structure, tuple(specs), tuple(columns), block.num_rows)
