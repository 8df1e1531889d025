"""Conversion between blocks and `pyarrow.RecordBatch`es, without copies where Arrow's layout is numpy's.

| column of a block                | column of a record batch               | copies |
|----------------------------------|----------------------------------------|--------|
| numbers                          | the same type                          | none   |
| tensors of numbers               | fixed_shape_tensor                     | none   |
| bools                            | bool; tensors of them as uint8         | one    |
| bfloat16, float8                 | their memory, as uint16 and uint8      | none   |
| dates, times                     | their memory, as int64                 | none   |
| complex numbers                  | fixed_shape_tensor of (real, imaginary)| none   |
| bytes, str                       | large_binary, large_string             | one    |
| tensors of bytes or str          | nested fixed_size_list                 | one    |
| tensors of differing shapes      | struct of values and shape             | one    |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from raydist.core.errors import SpecError
from raydist.core.nest import Structure
from raydist.pipelines.elements.batch_rows import rows_of_batch
from raydist.pipelines.elements.blocks import Block, Column, object_column
from raydist.pipelines.elements.rows import stack_leaves
from raydist.pipelines.elements.small_floats import as_bits, bits_dtype, dtype_named, has_bits
from raydist.pipelines.elements.spec import TensorSpec

DTYPE_KEY = b"raydist.dtype"
"""Key of a column's numpy dtype in the metadata of its field."""


def arrow_batches(block: Block) -> list[pa.RecordBatch]:
    """Return one record batch per element, whose rows are the entries of the element's first dimension."""
    places = block.structure.places()  # columns in the order of keys that the user sees
    return [block_to_arrow(rows_of_batch(block.slice(row, row + 1))).select(places) for row in range(block.num_rows)]


def block_to_arrow(block: Block) -> pa.RecordBatch:
    """Return a record batch with one row per element and one column per leaf, named by path ("value" if single).

    >>> from raydist.pipelines.elements.rows import block_of_rows
    >>> block_to_arrow(block_of_rows([{"x": 1, "y": "a"}])).column_names
    ['x', 'y']
    """
    arrays = [column_to_arrow(column) for column in block.columns]
    pairs = zip(block.structure.paths(), arrays, block.columns, block.specs, strict=True)
    fields = [
        pa.field(path or "value", array.type, metadata={DTYPE_KEY: _dtype_text(column, spec)})
        for path, array, column, spec in pairs
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def _dtype_text(column: Column, spec: TensorSpec) -> bytes:
    return str(column.dtype if column.dtype != object else spec.dtype).encode()


def block_of_arrow(batch: pa.RecordBatch, structure: Structure) -> Block:
    """Return the block from which :func:`block_to_arrow` made `batch`. Columns that map the batch are read-only.

    Raises:
        SpecError: The number of columns differs from the number of leaves of the structure.
    """
    if batch.num_columns != structure.num_leaves:
        raise SpecError(
            f"A record batch must have one column per leaf of {structure}, got columns {batch.schema.names}."
        )
    columns, specs = [], []
    for field, array in zip(batch.schema, batch.columns, strict=True):
        dtype = dtype_named((field.metadata or {}).get(DTYPE_KEY, b"object").decode())
        column = column_of_arrow(array, dtype)
        columns.append(column)
        specs.append(_spec(column, dtype))
    return Block(structure, tuple(specs), tuple(columns), batch.num_rows)


def _spec(column: Column, dtype: np.dtype[Any]) -> TensorSpec:
    if column.dtype != object:
        return TensorSpec(column.shape[1:], column.dtype)
    if column.ndim == 1 and len(column) and isinstance(column[0], np.ndarray):
        return stack_leaves(list(column), {np.ndarray})[1]
    return TensorSpec(column.shape[1:], dtype)


def column_to_arrow(column: Column) -> pa.Array:
    """Return a column as an Arrow array, with one entry per row."""
    column = as_bits(column)
    if column.dtype.kind == "c":
        halves = np.ascontiguousarray(column).view(f"f{column.dtype.itemsize // 2}")
        return _tensors(halves.reshape(*column.shape, 2))
    if column.dtype != object:
        return _numbers(column) if column.ndim == 1 else _tensors(column)
    if column.ndim > 1:
        return _text_tensors(column)
    if len(column) and isinstance(column[0], np.ndarray):
        return _ragged(column)
    return _text(column)


def _tensors(column: Column) -> pa.Array:
    if column.dtype == np.bool_:
        column = column.view(np.uint8)
    kind = pa.fixed_shape_tensor(pa.from_numpy_dtype(column.dtype), column.shape[1:])
    storage = _lists(_numbers(column.reshape(-1)), int(np.prod(column.shape[1:])), len(column))
    return pa.ExtensionArray.from_storage(kind, storage)


def _numbers(column: Column) -> pa.Array:
    if column.dtype.kind not in "iuf" or not column.dtype.isnative:
        return pa.array(column)
    values = pa.py_buffer(np.ascontiguousarray(column))  # `pa.array` would import pandas first, which takes 0.3 s
    return pa.Array.from_buffers(pa.from_numpy_dtype(column.dtype), len(column), [None, values])


def _lists(values: pa.Array, size: int, count: int) -> pa.Array:
    """Return `count` lists of `size` values. Unlike `FixedSizeListArray.from_arrays`, a size of 0 works."""
    return pa.Array.from_buffers(pa.list_(values.type, size), count, [None], children=[values])


def _text(column: Column) -> pa.Array:
    is_str = len(column) > 0 and isinstance(column[0], str)
    return pa.array(list(column), pa.large_string() if is_str else pa.large_binary())


def _text_tensors(column: Column) -> pa.Array:
    array = _text(column.reshape(-1))
    for axis in range(column.ndim - 1, 0, -1):
        array = _lists(array, column.shape[axis], int(np.prod(column.shape[:axis])))
    return array


def _ragged(column: Column) -> pa.Array:
    values = column_to_arrow(
        np.concatenate([row.reshape(-1) for row in column])
    )  # one type, also for rows without values
    offsets = np.cumsum([0, *(row.size for row in column)])
    shapes = pa.array([list(row.shape) for row in column], pa.large_list(pa.int64()))
    joined = pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values)
    return pa.StructArray.from_arrays([joined, shapes], ["values", "shape"])


def column_of_arrow(array: pa.Array, dtype: np.dtype[Any]) -> Column:
    """Return the column of `dtype` from which :func:`column_to_arrow` made `array`; read-only if it maps the array."""
    if pa.types.is_struct(array.type):
        return _of_ragged(array, dtype)
    if has_bits(dtype):
        return column_of_arrow(array, bits_dtype(dtype)).view(dtype)
    if isinstance(array.type, pa.FixedShapeTensorType):
        return _of_tensors(array, dtype)
    if pa.types.is_fixed_size_list(array.type):
        return _of_text_tensors(array)
    if dtype.kind in "OSU":
        return object_column(array.to_pylist())
    if _is_plain(array, dtype):
        return _of_numbers(array, dtype)
    return np.asarray(array.to_numpy(zero_copy_only=False))


def maps(array: pa.Array, dtype: np.dtype[Any]) -> bool:
    """Return True if :func:`column_of_arrow` returns the memory of `array` itself, for any length."""
    if isinstance(array.type, pa.FixedShapeTensorType):
        return True
    return _is_plain(array, bits_dtype(dtype))


def _is_plain(array: pa.Array, dtype: np.dtype[Any]) -> bool:
    native = dtype.kind in "iuf" and dtype.isnative
    return native and not array.null_count and array.type == pa.from_numpy_dtype(dtype)


def _of_numbers(array: pa.Array, dtype: np.dtype[Any]) -> Column:
    values = array.buffers()[1]  # `to_numpy` would import pandas first
    if not len(array) or values is None:
        return np.empty(0, dtype)
    column = np.frombuffer(values, dtype, len(array), array.offset * dtype.itemsize)
    column.flags.writeable = False
    return column


def _of_tensors(array: Any, dtype: np.dtype[Any]) -> Column:
    column = array.to_numpy_ndarray()
    if dtype == np.bool_:
        return np.asarray(column.view(np.bool_))
    if dtype.kind == "c":
        return np.asarray(column.view(dtype).reshape(column.shape[:-1]))
    return np.asarray(column)


def _of_text_tensors(array: Any) -> Column:
    shape = [len(array)]
    while pa.types.is_fixed_size_list(array.type):
        shape.append(array.type.list_size)
        array = array.flatten()
    return object_column(array.to_pylist()).reshape(shape)


def _of_ragged(array: pa.Array, dtype: np.dtype[Any]) -> Column:
    parts: Sequence[Any] = array.field("values")
    shapes = array.field("shape").to_pylist()
    return object_column(
        [column_of_arrow(part.values, dtype).reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
    )
