"""Between what users hold (str, bytes, numpy arrays) and Arrow arrays.

Arrow holds one entry for each element of the array outside, row by row; `shape` is that of the array outside.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from raydist.errors import InvalidArgumentError, SpecError
from raydist.pipelines.elements.blocks import object_column

__all__ = ["from_arrow", "is_list", "list_array", "map_values", "offsets_of", "to_arrow"]

_Array = np.ndarray[Any, np.dtype[Any]]


def to_arrow(values: Any, *, fold: bool = False) -> tuple[pa.Array, tuple[int, ...]]:
    """`values` as Arrow entries, and their shape.

    Args:
        values: str, bytes, an array or list of them, an integer array, or an object array of arrays (lists).
        fold: Make lists of the last axis of an array that has none.
    """
    if isinstance(values, list) and not values:
        values = np.empty(0, np.int64 if fold else object)  # sequences are of ids
    outside = _outside(values)
    if outside.dtype == object and outside.size and isinstance(outside.flat[0], np.ndarray):
        return _lists(outside), outside.shape
    flat = _flat(outside)
    if not fold:
        return flat, outside.shape
    if outside.ndim == 0:
        raise SpecError(
            f"A sequence is needed, got the single value {values!r:.80}. Give a list, or split the text first."
        )
    length = outside.shape[-1]
    count = outside.size // length if length else int(np.prod(outside.shape[:-1]))
    return list_array(np.arange(count + 1) * length, flat), outside.shape[:-1]


def _outside(values: Any) -> _Array:
    if isinstance(values, str | bytes):
        return object_column([values]).reshape(())
    if isinstance(values, list):
        return object_column(values) if any(isinstance(item, str | bytes) for item in values) else np.array(values)
    return np.asarray(values)


def _flat(outside: _Array) -> pa.Array:
    if outside.dtype.kind in "iu":
        return pa.array(outside.ravel().astype(np.int64))
    if outside.dtype.kind in "OSU":
        return _text(outside.ravel().tolist())
    raise SpecError(f"Text must be str or bytes, and ids integers, got an array of {outside.dtype}.")


def _lists(outside: _Array) -> pa.Array:
    rows = [np.asarray(row) for row in outside.flat]
    deeper = [row.shape for row in rows if row.ndim != 1]
    if deeper:
        raise SpecError(f"Every entry must be a list, an array of one dimension, got an array of shape {deeper[0]}.")
    offsets = np.cumsum([0, *map(len, rows)])
    full = [row for row in rows if len(row)]  # an empty row may have any dtype
    return list_array(offsets, _flat(np.concatenate(full or rows)))


def _text(values: list[Any]) -> pa.Array:
    try:
        array = pa.array(values, pa.large_string())
    except (pa.ArrowException, UnicodeError, TypeError) as error:
        raise _not_text(values) or error from error
    if array.null_count:
        raise SpecError(f"Text must be str or bytes, got None in row {array.is_null().index(True).as_py()}.")
    return array


def _not_text(values: list[Any]) -> Exception | None:
    """The error of the first value that is no text."""
    for row, value in enumerate(values):
        if not isinstance(value, str | bytes):
            return SpecError(f"Text must be str or bytes, got {value!r:.80} ({type(value).__name__}) in row {row}.")
        try:
            value.decode() if isinstance(value, bytes) else value.encode()
        except UnicodeError as error:
            return InvalidArgumentError(
                f"Text must be valid UTF-8, got {value!r:.80} in row {row}: {error}. Decode it in a map before, with "
                'its own encoding or with errors="replace".'
            )
    return None


def from_arrow(array: pa.Array, shape: tuple[int, ...]) -> Any:
    """The entries of `array` as an array of `shape`; a single one (shape ()) as str, int64 or array."""
    kind = array.type
    if pa.types.is_fixed_size_list(kind):
        return _numpy(array.flatten()).reshape(*shape, kind.list_size)
    if not is_list(array):
        flat = _numpy(array)
        return flat.reshape(shape) if shape else flat[0]
    values, offsets = _numpy(array.values), offsets_of(array)
    rows = [values[start:stop] for start, stop in zip(offsets[:-1], offsets[1:], strict=True)]
    return object_column(rows).reshape(shape) if shape else rows[0]


def _numpy(array: pa.Array) -> _Array:
    numbers: _Array = array.to_numpy(zero_copy_only=False)
    return numbers if numbers.flags.writeable else numbers.copy()


def is_list(array: pa.Array) -> bool:
    """Whether the entries are lists of any length."""
    return bool(pa.types.is_list(array.type) or pa.types.is_large_list(array.type))


def list_array(offsets: Any, values: pa.Array) -> pa.Array:
    """Lists, list i being `values[offsets[i]:offsets[i + 1]]`."""
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values)


def offsets_of(array: pa.Array) -> _Array:
    """The offsets of lists into `array.values`."""
    offsets: _Array = array.offsets.to_numpy()
    return offsets


def map_values(array: pa.Array, fn: Any) -> pa.Array:
    """`fn` of all entries; of the values inside, if the entries are lists."""
    return list_array(offsets_of(array), fn(array.values)) if is_list(array) else fn(array)
