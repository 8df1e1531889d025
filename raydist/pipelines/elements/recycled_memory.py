"""A pool that reuses the memory of large arrays.

The operating system takes as long to provide new pages as numpy takes to copy an array into them.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, final

import numpy as np

_Array = np.ndarray[Any, np.dtype[Any]]

_LARGE_BYTES = 1 << 20  # malloc serves smaller arrays from pages that the process has already
_MAX_IDLE = 4  # arrays in the pool; two workers together have four blocks in flight


@final
class RecycledMemory:
    """A thread-safe pool of memory for arrays. The memory of an array returns to the pool once the array is garbage.

    Args:
        most_idle_bytes: Largest array whose memory the pool keeps; larger ones are freed at once.
    """

    def __init__(self, most_idle_bytes: int) -> None:
        self._most_idle_bytes = most_idle_bytes
        self._idle: dict[int, _Array] = {}

    def copy(self, array: _Array) -> _Array:
        """Return a C-contiguous copy, which shares no memory with `array`."""
        out = self.empty(array.shape, array.dtype)
        out[...] = array
        return out

    def take(self, column: _Array, indices: np.ndarray[Any, np.dtype[np.int64]]) -> _Array:
        """Return `column[indices]` as a copy, never as a view."""
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
        """Return an array over memory of the pool; None for small arrays and objects, which numpy allocates."""
        num_bytes = dtype.itemsize * math.prod(shape)
        if num_bytes < _LARGE_BYTES or dtype.hasobject:
            return None
        return np.ndarray(shape, dtype, self._block_view(num_bytes).data)

    def _block_view(self, num_bytes: int) -> _Array:
        """Return a view of a block. The block returns to the pool once no array uses the view."""
        block = self._idle_or_new_block(num_bytes)
        # Arrays refer to this view through a memoryview, and keep it alive. The finalizer runs after the last of them.
        view = np.frombuffer(block.data, np.uint8, num_bytes)
        weakref.finalize(view, _put_back, weakref.ref(self), block).atexit = False
        return view

    def _idle_or_new_block(self, num_bytes: int) -> _Array:
        for name, block in tuple(self._idle.items()):
            # `pop` returns None if another thread has taken the block.
            if num_bytes <= len(block) <= 2 * num_bytes and self._idle.pop(name, None) is not None:
                return block
        return np.empty(num_bytes, np.uint8)


def _put_back(owner: weakref.ref[RecycledMemory], block: _Array) -> None:
    pool = owner()
    if pool is not None and len(pool._idle) < _MAX_IDLE and len(block) <= pool._most_idle_bytes:
        pool._idle[id(block)] = block
