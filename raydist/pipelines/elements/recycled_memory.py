"""Reuse of the memory of large arrays: fresh pages from the system cost as much time as a copy into them."""

from __future__ import annotations

import math
import weakref
from typing import Any, final

import numpy as np

_Array = np.ndarray[Any, np.dtype[Any]]

_LARGE_BYTES = 1 << 20  # smaller arrays come from the heap
_MOST_IDLE = 4  # arrays: as many blocks are in flight to two workers


@final
class RecycledMemory:
    """A pool of memory for arrays, which reuses the memory of arrays that are garbage. Safe for several threads.

    Args:
        most_idle_bytes: Larger arrays are freed at once.
    """

    def __init__(self, most_idle_bytes: int) -> None:
        self._most_idle_bytes = most_idle_bytes
        self._idle: dict[int, _Array] = {}

    def copy(self, array: _Array) -> _Array:
        """Return a private, C-contiguous copy."""
        out = self.empty(array.shape, array.dtype)
        out[...] = array
        return out

    def take(self, column: _Array, indices: np.ndarray[Any, np.dtype[np.int64]]) -> _Array:
        """Return `column[indices]`; never a view."""
        out = self._recycled((len(indices), *column.shape[1:]), column.dtype)
        if out is None or indices.dtype.kind not in "iu" or indices.min() < 0 or indices.max() >= len(column):
            chosen: _Array = column[indices]  # numpy handles other kinds of indices
            return chosen
        np.take(column, indices, 0, out, mode="clip")  # other modes write to a temporary array first
        return out

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> _Array:
        """Return an uninitialised array."""
        out = self._recycled(shape, dtype)
        return np.empty(shape, dtype) if out is None else out

    def _recycled(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> _Array | None:
        """Return an array of the pool; None to leave the allocation to numpy."""
        num_bytes = dtype.itemsize * math.prod(shape)
        if num_bytes < _LARGE_BYTES or dtype.hasobject:
            return None
        return np.ndarray(shape, dtype, self._memory(num_bytes).data)

    def _memory(self, num_bytes: int) -> _Array:
        """Return bytes of a block that returns to the pool when the last array over them is garbage."""
        block = self._take(num_bytes)
        # A separate view: later arrays refer to this view and not to the block, because its buffer is a memoryview.
        lent = np.frombuffer(block.data, np.uint8, num_bytes)
        weakref.finalize(lent, _put_back, weakref.ref(self), block).atexit = False
        return lent

    def _take(self, num_bytes: int) -> _Array:
        for name, block in tuple(self._idle.items()):
            # None if another thread was faster.
            if num_bytes <= len(block) <= 2 * num_bytes and self._idle.pop(name, None) is not None:
                return block
        return np.empty(num_bytes, np.uint8)


def _put_back(owner: weakref.ref[RecycledMemory], block: _Array) -> None:
    memory = owner()
    if memory is not None and len(memory._idle) < _MOST_IDLE and len(block) <= memory._most_idle_bytes:
        memory._idle[id(block)] = block
