"""Memory that is there for as many rows as there could be, and taken for those that are."""

from __future__ import annotations

import mmap
from typing import final

import numpy as np
import torch

from raydist.errors import UnavailableError

__all__ = ["ReservedRows"]

# Addresses only: pages count once they are written. Python 3.11 does not name it.
_NO_RESERVE = 0x4000


@final
class ReservedRows:
    """Rows one after the other, which never move.

    Args:
        most: Rows that there could be.
        width: Values in a row.
        dtype: Of the values.

    Attributes:
        values: All that there could be; the first `count` of them exist.
        count: How many rows exist.
    """

    def __init__(self, most: int, width: int, dtype: torch.dtype) -> None:
        self.count = 0
        self._row_bytes = width * dtype.itemsize
        size = most * self._row_bytes
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        except OSError as error:
            raise UnavailableError(
                f"A table reserves addresses for all rows that it could have, but {size:,} bytes were refused: "
                f"{error.strerror or error}. Let the kernel overcommit memory (vm.overcommit_memory=0 or 1) and set no "
                "limit to addresses (ulimit -v unlimited); only rows that are touched take memory."
            ) from error
        self.values = torch.frombuffer(memory, dtype=dtype, count=most * width).view(most, width)
        self._cells = np.frombuffer(memory, dtype=f"V{self._row_bytes}")

    @property
    def num_bytes(self) -> int:
        """Of the rows that exist."""
        return self.count * self._row_bytes

    def take(self, places: torch.Tensor) -> torch.Tensor:
        """Copies of the rows at these places."""
        return self.values.index_select(0, places)

    def put(self, places: torch.Tensor, values: torch.Tensor) -> None:
        """Replace the rows at these places. Half of what `index_copy_` costs: a row is one piece of memory."""
        cells = values.detach().contiguous().view(torch.uint8).numpy().reshape(-1).view(self._cells.dtype)
        self._cells[places.numpy()] = cells

    def extend(self, count: int, fill: float = 0.0) -> None:
        """Let there be `count` rows in all, new ones with this value everywhere."""
        if fill and count > self.count:
            self.values[self.count : count] = fill
        self.count = max(count, self.count)
