"""Rows of Arrow tables, of any origin, as blocks: columns by name as a dict.

(Blocks as record batches of raydist's own, and back: `arrow.py`.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import pyarrow as pa

from raydist.errors import RaydistError
from raydist.nest import flatten
from raydist.pipelines.elements.arrow_fields import Conversion, fields_of_schema
from raydist.pipelines.elements.arrow_types import RowNulls, Spread, may_have_nulls
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError, Item

__all__ = ["RowSchema"]

_AS_IT_IS = Conversion()


@final
class RowSchema:
    """Makes blocks of the rows of tables of one schema.

    Attributes:
        schema: Of the tables.
        spec: Nest of TensorSpec of one row.
    """

    def __init__(self, schema: pa.Schema, conversion: Conversion = _AS_IT_IS) -> None:
        self.schema = schema
        self._fields = fields_of_schema(schema, conversion)
        self.spec = {key: spec for field in self._fields for key, spec in field.specs().items()}
        self._specs, self._structure = flatten(self.spec)

    def block(self, batch: pa.RecordBatch) -> tuple[Block, Mapping[int, str]]:
        """The rows of `batch`, and those with a null that has no value here: a column with one by the row's number.

        Numbers are not copied: their columns are read-only.
        """
        nulls = RowNulls()
        spread = Spread(batch.num_rows)
        columns: dict[str, Any] = {}
        for field, array in zip(self._fields, batch.columns, strict=True):
            columns |= field.columns(array, spread, nulls)
        leaves, _ = flatten(columns)
        return Block(self._structure, tuple(self._specs), tuple(leaves), batch.num_rows), nulls.rows

    def items(self, batch: pa.RecordBatch, null_error: Callable[[int, str], RaydistError]) -> list[Item]:
        """The rows of `batch`; where one has such a null, `null_error(row, column)` stands in its place."""
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
        """The rows with such a null, as `block` finds them; looks only at columns that may have one."""
        nulls = RowNulls()
        for field, array in zip(self._fields, batch.columns, strict=True):
            if may_have_nulls(array):
                field.columns(array, Spread(batch.num_rows), nulls)
        return nulls.rows
