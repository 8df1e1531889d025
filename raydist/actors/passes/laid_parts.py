"""Arrays of a step or several that are to be one column, written into the store one after the other, not joined.

Ray writes the buffers of a pickle into the store in their order, each at a multiple of 64 bytes: those of a multiple of
64 bytes have no gaps between them, and are one array where they are read. To join them first would be a copy more.
Where they do not lie so, the arrays are joined by who reads them.

Ray starts six threads for each buffer of 1 MB or more, to write it. Where there are few cores, that takes longer than
to write it: 8 MB in one buffer take 1.1 ms, in nine 0.7 (two cores). So large arrays are cut.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np
import pyarrow as pa

from raydist.pipelines.engine.machine import num_cores

__all__ = ["LaidParts"]

_Array = np.ndarray[Any, np.dtype[Any]]

_ALIGNMENT = 64
_LEAST_BYTES = 32 << 10  # of a part: a buffer of its own costs some microseconds
_MOST_BYTES = (1 << 20) - _ALIGNMENT  # that Ray writes without threads
_CORES_FOR_THREADS = 12  # as many as Ray starts, in two processes


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
        if parts[0].dtype.kind not in "biuf" or not all(part.flags.c_contiguous for part in parts):
            return False
        if len(parts) == 1:
            return len(_cuts(parts[0].nbytes)) > 1
        return all(part.nbytes >= _LEAST_BYTES and part.nbytes % _ALIGNMENT == 0 for part in parts)

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self._parts)

    def join(self) -> _Array:
        """All parts as one array; copied where they are several."""
        return self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts)

    def __reduce__(self) -> tuple[Any, ...]:
        first = self._parts[0]
        return _as_one, (first.dtype, first.shape[1:], *map(pickle.PickleBuffer, self._buffers()))

    def _buffers(self) -> Iterator[memoryview]:
        for part in self._parts:
            memory = part.reshape(-1).view(np.uint8).data
            yield from (memory[cut] for cut in _cuts(part.nbytes))


def _cuts(num_bytes: int) -> list[slice]:
    """Where an array of so many bytes is cut."""
    most = _MOST_BYTES if num_cores() < _CORES_FOR_THREADS else max(num_bytes, 1)
    return [slice(start, min(start + most, num_bytes)) for start in range(0, num_bytes, most)]


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
