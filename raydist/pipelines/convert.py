"""Blocks as the elements that users see: rows of numpy or of torch values.

Every array handed out is the receiver's own: rows of read-only columns are copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from raydist.pipelines.blocks import Block, Column
from raydist.pipelines.functions import copy_rows, element_rows

__all__ = ["numpy_rows", "torch_rows"]


def numpy_rows(block: Block) -> list[Any]:
    """Elements as nests of numpy arrays, numpy scalars, bytes and str."""
    return list(element_rows(block.structure, [_own(column) for column in block.columns]))


def torch_rows(block: Block, from_numpy: Callable[[Any], Any]) -> list[Any]:
    """Elements as nests of torch tensors; bytes and str stay Python objects, arrays of them object arrays.

    `from_numpy` is torch's: this layer does without importing it.
    """
    columns = [_tensor_rows(_own(column), from_numpy) for column in block.columns]
    return list(element_rows(block.structure, columns))


def _own(column: Column) -> Column:
    """`column`, or a copy where something else reads it too."""
    if column.dtype == object:
        if column.ndim == 1 and any(isinstance(row, np.ndarray) and not row.flags.writeable for row in column):
            return copy_rows(column)
        return column if column.flags.writeable or column.ndim == 1 else column.copy()
    return column if column.flags.writeable else column.copy()


def _tensor_rows(column: Column, from_numpy: Callable[[Any], Any]) -> Any:
    if column.dtype != object:
        # A 0-d view, not a scalar: from_numpy takes arrays. A tensor of a view pickles that view's bytes alone.
        return [from_numpy(column[index, ...]) for index in range(len(column))]
    return [_tensor(row, from_numpy) for row in column]


def _tensor(row: Any, from_numpy: Callable[[Any], Any]) -> Any:
    return from_numpy(row) if isinstance(row, np.ndarray) and row.dtype != object else row
