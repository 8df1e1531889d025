"""Columns in the form in which they are written into the object store, and read from it in place.

Ray writes the buffers of a pickle into the store in order, each at a multiple of 64 bytes: buffers whose size is a
multiple of 64 bytes follow each other without gaps, and the reader sees them as one array without a copy. Other parts
are concatenated by the reader.
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
_LEAST_BYTES = 32 << 10  # of a part: a separate buffer costs some microseconds

ArrowColumn = tuple[pa.Array, bytes]
"""A column as an Arrow array, and the name of its dtype."""

PICKLED = b"pickle"
"""In place of a dtype: the entries are pickled, one by one."""

_MOST_ENTRIES = (1 << 31) - 1  # limit for a row of Arrow's fixed-size lists


@final
class ConcatenatedParts:
    """The parts of one column, in order, which unpickle as one array.

    Args:
        parts: Arrays of the same dtype and row shape.
    """

    def __init__(self, parts: Sequence[_Array]) -> None:
        self._parts = parts

    @classmethod
    def suit(cls, parts: Sequence[_Array]) -> bool:
        """Return True if writing these parts separately saves time."""
        if len(parts) == 1 or parts[0].dtype.kind not in "biuf":
            return False
        return all(
            part.flags.c_contiguous and part.nbytes >= _LEAST_BYTES and part.nbytes % _ALIGNMENT == 0 for part in parts
        )

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def join(self) -> _Array:
        return np.concatenate(self._parts)

    def __reduce__(self) -> tuple[Any, ...]:
        first = self._parts[0]
        return _as_one, (first.dtype, first.shape[1:], *(pickle.PickleBuffer(part.data) for part in self._parts))


def _as_one(dtype: np.dtype[Any], row_shape: tuple[int, ...], *buffers: Any) -> _Array:
    """Return the array in `buffers`, a view if they are contiguous in memory, else a copy."""
    parts = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
    starts = [part.__array_interface__["data"][0] for part in parts]
    follow = all(start + len(part) == after for start, part, after in zip(starts, parts, starts[1:], strict=False))
    if follow:
        memory = pa.foreign_buffer(starts[0], sum(map(len, parts)), base=parts)
        whole = np.frombuffer(memory, np.uint8)
    else:
        whole = np.concatenate(parts)
    return whole.view(dtype).reshape(-1, *row_shape)


def pack_column(column: _Array) -> ArrowColumn:
    """Return a column as an Arrow array; its rows pickled where Arrow has no type for them."""
    if column[:1].size > _MOST_ENTRIES:
        return pickle_rows(column), PICKLED
    try:
        return column_to_arrow(column), _dtype_of(column)
    except (pa.ArrowException, TypeError, ValueError):  # text that is not Unicode (file names, say), objects
        return pickle_rows(column), PICKLED


def _dtype_of(column: _Array) -> bytes:
    first = column[0] if column.dtype == object and column.ndim == 1 and len(column) else column
    return str(first.dtype if isinstance(first, np.ndarray) else column.dtype).encode()


def pickle_rows(column: Iterable[Any]) -> pa.Array:
    """Return an Arrow array of the pickles of some rows."""
    return pa.array([pickle.dumps(row, protocol=5) for row in column], pa.large_binary())


def unpack_column(array: pa.Array, dtype: bytes) -> _Array:
    """Return the column of an Arrow array that `pack_column` made; numbers without a copy."""
    if dtype != PICKLED:
        return column_of_arrow(array, dtype_named(dtype.decode()))
    rows = [pickle.loads(entry) for entry in array.to_pylist()]
    if rows and isinstance(rows[0], np.ndarray) and rows[0].dtype != object:
        return np.stack(rows)
    column = np.empty(len(rows), dtype=object)
    column[:] = rows
    return column
