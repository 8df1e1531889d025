"""Conversion of the rows of any Arrow table to blocks: each row is a dict of its columns by name.

(`arrow.py` converts raydist's own blocks to record batches and back.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import pyarrow as pa

from raydist.core.errors import RaydistError
from raydist.core.nest import flatten
from raydist.pipelines.elements.arrow_fields import Conversion, fields_of_schema
from raydist.pipelines.elements.arrow_types import RowNulls, Spread, may_have_nulls
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError, Item

_AS_IT_IS = Conversion()


@final
class RowSchema:
    """A converter of the rows of tables with one schema to blocks."""

    def __init__(self, schema: pa.Schema, conversion: Conversion = _AS_IT_IS) -> None:
        self.schema = schema
        self._fields = fields_of_schema(schema, conversion)
        self.spec = {key: spec for field in self._fields for key, spec in field.specs().items()}
        self._specs, self._structure = flatten(self.spec)

    def block(self, batch: pa.RecordBatch) -> tuple[Block, Mapping[int, str]]:
        """Return the rows of `batch`, and for each row with a null that has no replacement, one such column.

        Numbers are not copied: such columns are read-only.
        """
        nulls = RowNulls()
        spread = Spread(batch.num_rows)
        columns: dict[str, Any] = {}
        for field, array in zip(self._fields, batch.columns, strict=True):
            columns |= field.columns(array, spread, nulls)
        leaves, _ = flatten(columns)
        return Block(self._structure, tuple(self._specs), tuple(leaves), batch.num_rows), nulls.rows

    def items(self, batch: pa.RecordBatch, null_error: Callable[[int, str], RaydistError]) -> list[Item]:
        """Return the rows of `batch`, with `null_error(row, column)` in place of each row with such a null."""
        block, nulls = self.block(batch)
        if not nulls:
            return [block]
        items: list[Item] = []
        start = 0
        for row, column in sorted(nulls.items()):
            if row > start:
                items.append(block.slice(start, row))
            items.append(ElementError(null_error(row, column)))
            start = row + 1
        return items if start == batch.num_rows else [*items, block.slice(start, batch.num_rows)]

    def null_rows(self, batch: pa.RecordBatch) -> dict[int, str]:
        """Return the rows with such a null, like `block`; reads only columns that may have one."""
        nulls = RowNulls()
        for field, array in zip(self._fields, batch.columns, strict=True):
            if may_have_nulls(array):
                field.columns(array, Spread(batch.num_rows), nulls)
        return nulls.rows
