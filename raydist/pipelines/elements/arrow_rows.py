"""Rows of Arrow tables, of any origin, as blocks: columns by name as a dict.

(Blocks as record batches of raydist's own, and back: `arrow.py`.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import numpy as np
import pyarrow as pa

from raydist.errors import RaydistError
from raydist.nest import flatten
from raydist.pipelines.elements.arrow_types import is_text, spec_of_schema
from raydist.pipelines.elements.blocks import Block, Column, object_column
from raydist.pipelines.elements.items import ElementError, Item

__all__ = ["RowSchema", "null_rows"]

_Mask = np.ndarray[Any, np.dtype[np.bool_]]


@final
class RowSchema:
    """Makes blocks of the rows of tables of one schema.

    Attributes:
        schema: Of the tables.
        spec: Nest of TensorSpec of one row.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.spec = spec_of_schema(schema)
        self._specs, self._structure = flatten(self.spec)

    def block(self, batch: pa.RecordBatch) -> Block:
        """The rows of `batch`, which has no nulls. Numbers are not copied: their columns are read-only."""
        leaves, _ = flatten({name: _leaves(batch.column(name)) for name in batch.schema.names})
        return Block(self._structure, tuple(self._specs), tuple(leaves), batch.num_rows)

    def items(self, batch: pa.RecordBatch, null_error: Callable[[int, str], RaydistError]) -> list[Item]:
        """The rows of `batch`; where one has a null, `null_error(row, column)` stands in its place."""
        nulls = null_rows(batch)
        if not nulls:
            return [self.block(batch)]
        items: list[Item] = []
        start = 0
        for row, column in sorted(nulls.items()):
            if row > start:
                items.append(self.block(batch.slice(start, row - start)))
            items.append(ElementError(null_error(row, column)))
            start = row + 1
        return items if start == batch.num_rows else [*items, self.block(batch.slice(start))]


def null_rows(batch: pa.RecordBatch) -> dict[int, str]:
    """The rows that have a null, at any depth, and one column of each in which it is.

    >>> null_rows(pa.RecordBatch.from_pydict({"x": [1, None], "y": [[1], [2]]}))
    {1: 'x'}
    """
    found: dict[int, str] = {}
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        mask = _nulls(array)
        if mask is not None:
            found |= {int(row): name for row in np.flatnonzero(mask)}
    return found


def _nulls(array: pa.Array) -> _Mask | None:
    """Which rows have a null; None where no row has."""
    own = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
    inner = _inner_nulls(array)
    if own is None or inner is None:
        return inner if own is None else own
    return np.asarray(own | inner)


def _inner_nulls(array: pa.Array) -> _Mask | None:
    kind = array.type
    if isinstance(kind, pa.FixedShapeTensorType):
        return _nulls(array.storage)
    if pa.types.is_dictionary(kind):
        return _nulls(array.dictionary_decode()) if array.dictionary.null_count else None
    if pa.types.is_struct(kind):
        masks = [mask for mask in map(_nulls, array.flatten()) if mask is not None]
        return np.logical_or.reduce(masks) if masks else None
    if not (pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return None
    inside = _nulls(array.flatten())
    if inside is None:
        return None
    mask = np.zeros(len(array), np.bool_)
    mask[np.repeat(np.arange(len(array)), _lengths(array))[inside]] = True
    return mask


def _lengths(array: pa.Array) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Values that each list has in `array.flatten()`: none for a null."""
    lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    return np.asarray(lengths, np.int64)


def _leaves(array: pa.Array) -> Any:
    """The column, or a dict of columns for structs."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _leaves(array.dictionary_decode())
    if pa.types.is_struct(kind):
        names = [kind.field(i).name for i in range(kind.num_fields)]
        return {name: _leaves(child) for name, child in zip(names, array.flatten(), strict=True)}
    return _column(array)


def _column(array: pa.Array) -> Column:
    kind = array.type
    if is_text(kind):
        return object_column(array.to_pylist())
    if isinstance(kind, pa.FixedShapeTensorType):
        return _column(array.storage).reshape(len(array), *kind.shape)
    if pa.types.is_fixed_size_list(kind):
        values = _column(array.flatten())
        return values.reshape(len(array), kind.list_size, *values.shape[1:])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        values = _column(array.flatten())
        ends = np.cumsum(_lengths(array)).tolist()
        return object_column([values[start:end] for start, end in zip([0, *ends], ends, strict=False)])
    if pa.types.is_dictionary(kind):
        return _column(array.dictionary_decode())
    return np.asarray(array.to_numpy(zero_copy_only=False))
