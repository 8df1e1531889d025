"""Memory of large arrays that is used again: the system needs as long to give fresh pages as a copy to fill them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, final

import numpy as np

__all__ = ["RecycledMemory"]

_Array = np.ndarray[Any, np.dtype[Any]]

_LARGE_BYTES = 1 << 20  # for less there is the heap
_MOST_IDLE = 4  # arrays: as many blocks are on their way to two workers


@final
class RecycledMemory:
    """Arrays whose memory comes from arrays of this object that nobody sees any more.

    What comes back while the owner is gone, or holds enough, is freed. Any thread may use it.

    Args:
        most_idle_bytes: Larger arrays are freed: for an owner that lives as long as its process.
    """

    def __init__(self, most_idle_bytes: int | None = None) -> None:
        self._most_idle_bytes = most_idle_bytes
        self._idle: dict[int, _Array] = {}

    def copy(self, array: _Array) -> _Array:
        """A copy that is the caller's own, C-contiguous."""
        return self.concatenate([array]) if array.ndim else np.array(array)

    def concatenate(self, parts: Sequence[_Array]) -> _Array:
        """What numpy gives for arrays of one dtype and of shapes that differ in the first axis only; never a view."""
        out = self._empty(sum(len(part) for part in parts), parts[0])
        return np.concatenate(parts) if out is None else np.concatenate(parts, out=out)

    def take(self, column: _Array, indices: np.ndarray[Any, np.dtype[np.int64]]) -> _Array:
        """What numpy gives for `column[indices]`; never a view."""
        out = self._empty(len(indices), column)
        if out is None or indices.dtype.kind not in "iu" or indices.min() < 0 or indices.max() >= len(column):
            chosen: _Array = column[indices]  # numpy knows what else indices may mean
            return chosen
        np.take(column, indices, 0, out, mode="clip")  # another mode writes to memory of its own first
        return out

    def _empty(self, num_rows: int, like: _Array) -> _Array | None:
        """Memory for so many rows like those of an array; None where it is left to numpy."""
        shape = (num_rows, *like.shape[1:])
        num_bytes = like.dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        if num_bytes < _LARGE_BYTES or like.dtype.hasobject:
            return None
        return np.ndarray(shape, like.dtype, self._memory(num_bytes).data)

    def _memory(self, num_bytes: int) -> _Array:
        """Bytes of a block that comes back when the last array over them is gone."""
        block = self._take(num_bytes)
        # A view of its own: numpy lets arrays refer to it, and not to what it is a view of, as its buffer is a view.
        lent = np.frombuffer(block.data, np.uint8, num_bytes)
        weakref.finalize(lent, _put_back, weakref.ref(self), block).atexit = False
        return lent

    def _take(self, num_bytes: int) -> _Array:
        for name, block in tuple(self._idle.items()):
            # None where another thread was quicker.
            if num_bytes <= len(block) <= 2 * num_bytes and self._idle.pop(name, None) is not None:
                return block
        return np.empty(num_bytes, np.uint8)

    def _has_room(self, num_bytes: int) -> bool:
        """Whether a block of so many bytes may lie idle here."""
        return len(self._idle) < _MOST_IDLE and num_bytes <= (self._most_idle_bytes or num_bytes)


def _put_back(owner: weakref.ref[RecycledMemory], block: _Array) -> None:
    memory = owner()
    if memory is not None and memory._has_room(len(block)):
        memory._idle[id(block)] = block
