"""Memory with addresses for all rows that could exist; only existing rows take physical memory."""

from __future__ import annotations

import mmap
from typing import final

import numpy as np
import torch

from raydist.errors import UnavailableError

__all__ = ["ReservedRows"]

# Reserves addresses only: pages count once they are written. Python 3.11 has no name for this flag.
_NO_RESERVE = 0x4000


@final
class ReservedRows:
    """Consecutive rows, which never move.

    Args:
        most: Number of rows that could exist.
        width: Values in a row.
        dtype: Dtype of the values.

    Attributes:
        values: All rows that could exist; the first `count` of them exist.
        count: Number of existing rows.
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
        """Size of the existing rows in bytes."""
        return self.count * self._row_bytes

    def take(self, places: torch.Tensor) -> torch.Tensor:
        """Return copies of the rows at these positions."""
        return self.values.index_select(0, places)

    def put(self, places: torch.Tensor, values: torch.Tensor) -> None:
        """Replace the rows at these positions. Costs half of `index_copy_`: a row is one piece of memory."""
        cells = values.detach().contiguous().view(torch.uint8).numpy().reshape(-1).view(self._cells.dtype)
        self._cells[places.numpy()] = cells

    def extend(self, count: int, fill: float = 0.0) -> None:
        """Grow to `count` rows; new rows have this value everywhere."""
        if fill and count > self.count:
            self.values[self.count : count] = fill
        self.count = max(count, self.count)
