"""Columns of rows in formats that a reader of the object store uses without a copy.

Ray writes the buffers of a pickle into the store in order and aligns each buffer to 64 bytes. Buffers whose sizes are
multiples of 64 bytes therefore have no gaps between them, and the reader maps them as one array. If the buffers have
gaps, the reader concatenates them.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from typing import Any, final

import numpy as np
import pyarrow as pa

from raydist.pipelines.elements.arrow import column_of_arrow, column_to_arrow
from raydist.pipelines.elements.small_floats import dtype_named

_Array = np.ndarray[Any, np.dtype[Any]]

_ALIGNMENT = 64
_MIN_BYTES = 32 << 10  # a separate buffer costs some microseconds, so a smaller part is copied

ArrowColumn = tuple[pa.Array, bytes]
"""A column as an Arrow array, and the name of its dtype."""

PICKLED = b"pickle"
"""Stands for the name of a dtype if each row of the column is pickled by itself."""

_MAX_ROW_SIZE = (1 << 31) - 1  # Arrow's limit for the number of values in a fixed-size list


@final
class ConcatenatedParts:
    """The parts of one column, in order. Unpickling gives one array.

    Args:
        parts: Arrays of the same dtype and row shape.
    """

    def __init__(self, parts: Sequence[_Array]) -> None:
        self._parts = parts

    @classmethod
    def saves_time(cls, parts: Sequence[_Array]) -> bool:
        """Return True if writing these parts separately is faster than concatenating them first."""
        if len(parts) == 1 or parts[0].dtype.kind not in "biuf":
            return False
        return all(
            part.flags.c_contiguous and part.nbytes >= _MIN_BYTES and part.nbytes % _ALIGNMENT == 0 for part in parts
        )

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def join(self) -> _Array:
        return np.concatenate(self._parts)

    def __reduce__(self) -> tuple[Any, ...]:
        first = self._parts[0]
        return _join_buffers, (first.dtype, first.shape[1:], *(pickle.PickleBuffer(part.data) for part in self._parts))


def _join_buffers(dtype: np.dtype[Any], row_shape: tuple[int, ...], *buffers: Any) -> _Array:
    """Return the buffers as one array: a view if they are contiguous in memory, else a copy."""
    parts = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
    starts = [part.__array_interface__["data"][0] for part in parts]
    ends = [start + len(part) for start, part in zip(starts, parts, strict=True)]
    if ends[:-1] == starts[1:]:
        memory = pa.foreign_buffer(starts[0], sum(map(len, parts)), base=parts)
        whole = np.frombuffer(memory, np.uint8)
    else:
        whole = np.concatenate(parts)
    return whole.view(dtype).reshape(-1, *row_shape)


def pack_column(column: _Array) -> ArrowColumn:
    """Convert a column to an Arrow array. If Arrow has no type for the rows, pickle each row."""
    if column[:1].size > _MAX_ROW_SIZE:
        return pickle_rows(column), PICKLED
    try:
        return column_to_arrow(column), _dtype_of(column)
    except (pa.ArrowException, TypeError, ValueError):  # e.g. objects, or text that is not Unicode
        return pickle_rows(column), PICKLED


def _dtype_of(column: _Array) -> bytes:
    first = column[0] if column.dtype == object and column.ndim == 1 and len(column) else column
    return str(first.dtype if isinstance(first, np.ndarray) else column.dtype).encode()


def pickle_rows(column: Iterable[Any]) -> pa.Array:
    """Pickle each row, and return the pickles as an Arrow array."""
    return pa.array([pickle.dumps(row, protocol=5) for row in column], pa.large_binary())


def unpack_column(array: pa.Array, dtype: bytes) -> _Array:
    """Convert the result of `pack_column` back to a column. Does not copy numbers."""
    if dtype != PICKLED:
        return column_of_arrow(array, dtype_named(dtype.decode()))
    rows = [pickle.loads(entry) for entry in array.to_pylist()]
    if rows and isinstance(rows[0], np.ndarray) and rows[0].dtype != object:
        return np.stack(rows)
    column = np.empty(len(rows), dtype=object)
    column[:] = rows
    return column
