"""Arrays of several steps that are to be one column, written into the store one after the other without being joined.

Ray writes the buffers of a pickle into the store in their order, each at a multiple of 64 bytes: those of a multiple of
64 bytes have no gaps between them, and are one array where they are read. To join them first would be a copy more, of a
size for which Ray starts threads to write it (0.7 ms CPU a step of 400 KB in all, against 0.3). Where something is
otherwise, the arrays are joined by who reads them.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import pyarrow as pa

__all__ = ["LaidParts"]

_Array = np.ndarray[Any, np.dtype[Any]]

_ALIGNMENT = 64
_LEAST_BYTES = 32 << 10  # of a part: a buffer of its own costs some microseconds


@final
class LaidParts:
    """Parts of one column, in order; a pickle of it gives one array.

    Args:
        parts: Alike but for their rows.
    """

    def __init__(self, parts: Sequence[_Array]) -> None:
        self._parts = parts

    @classmethod
    def suit(cls, parts: Sequence[_Array]) -> bool:
        """Whether it saves something to keep these parts apart until they are written."""
        if len(parts) < 2 or parts[0].dtype.kind not in "biuf":
            return False
        return all(
            part.nbytes >= _LEAST_BYTES and part.flags.c_contiguous and part.nbytes % _ALIGNMENT == 0 for part in parts
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self._parts)

    def join(self) -> _Array:
        """All parts as one array, copied."""
        return np.concatenate(self._parts)

    def __reduce__(self) -> tuple[Any, ...]:
        first = self._parts[0]
        return _as_one, (first.dtype, first.shape[1:], *(pickle.PickleBuffer(part.data) for part in self._parts))


def _as_one(dtype: np.dtype[Any], row_shape: tuple[int, ...], *buffers: Any) -> _Array:
    """The array that lies in `buffers`, one after the other; joined if they do not follow each other in memory."""
    parts = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
    starts = [part.__array_interface__["data"][0] for part in parts]
    follow = all(start + len(part) == after for start, part, after in zip(starts, parts, starts[1:], strict=False))
    if follow:
        memory = pa.foreign_buffer(starts[0], sum(map(len, parts)), base=parts)
        whole = np.frombuffer(memory, np.uint8)
    else:
        whole = np.concatenate(parts)
    return whole.view(dtype).reshape(-1, *row_shape)
