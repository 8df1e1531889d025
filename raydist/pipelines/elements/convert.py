"""Conversion of blocks to the elements that users see: rows of numpy values or torch tensors.

The receiver owns every array: rows of read-only columns are copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from raydist.pipelines.elements.blocks import Block, Column, private_column
from raydist.pipelines.elements.functions import element_rows
from raydist.pipelines.elements.object_leaves import FromNumpy, ObjectLeaf
from raydist.pipelines.elements.small_floats import has_bits, tensor_of_array


def numpy_rows(block: Block) -> list[Any]:
    """Return the elements as nests of numpy arrays, numpy scalars, bytes and str."""
    columns = [_objects(column, None) or private_column(column) for column in block.columns]
    if block.structure.kind is None:
        return list(columns[0])
    return list(element_rows(block.structure, columns))


def torch_rows(block: Block, from_numpy: Callable[[Any], Any]) -> list[Any]:
    """Return the elements as nests of torch tensors. bytes and str stay Python objects, arrays of them object arrays.

    Dates and times are int64 numbers in the unit of `element_spec`.

    `from_numpy` is the function of torch, which this module does not import.
    """
    columns = [
        _objects(column, from_numpy) or _tensor_rows(private_column(column), from_numpy) for column in block.columns
    ]
    if block.structure.kind is None:
        return columns[0]
    return list(element_rows(block.structure, columns))


def _objects(column: Column, from_numpy: FromNumpy) -> list[Any]:
    """Return the rows of a column of objects such as lists of tensors; an empty list for any other column."""
    if column.dtype != object or column.ndim > 1 or not len(column) or not isinstance(column[0], ObjectLeaf):
        return []
    return [row.for_users(from_numpy) for row in column]


def _tensor_rows(column: Column, from_numpy: Callable[[Any], Any]) -> list[Any]:
    if has_bits(column.dtype):
        return [tensor_of_array(column[index, ...], from_numpy) for index in range(len(column))]
    if column.dtype != object:
        # A 0-d view, not a scalar: from_numpy takes arrays. A tensor of a view pickles only the bytes of the view.
        return [from_numpy(column[index, ...]) for index in range(len(column))]
    return [_tensor(row, from_numpy) for row in column]


def _tensor(row: Any, from_numpy: Callable[[Any], Any]) -> Any:
    return tensor_of_array(row, from_numpy) if isinstance(row, np.ndarray) and row.dtype != object else row
