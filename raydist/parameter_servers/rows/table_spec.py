"""What an embedding table is, wherever its rows lie. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import numpy as np
import torch

from raydist.parameter_servers.rows.scrambling import scramble

__all__ = ["EmbeddingTableSpec"]

_DEALING = np.uint64(0x5851F42D4C957F2D)


@final
@dataclass(frozen=True, slots=True)
class EmbeddingTableSpec:
    """A table of rows that exist once they are touched.

    Attributes:
        num_rows: Rows are numbered from 0 to below it.
        dim: Values in a row.
        dtype: Of the values.
        seed: Together with its number, it says what a row is at first.
        initializer: How first values are distributed: normal with mean 0, uniform between -1 and 1, or zero.
        scale: First values are multiplied by it.
        name: For messages.

    >>> EmbeddingTableSpec(10**9, 16).row_bytes
    64
    """

    num_rows: int
    dim: int
    dtype: torch.dtype = torch.float32
    seed: int = 0
    initializer: Literal["normal", "uniform", "zeros"] = "normal"
    scale: float = 1.0
    name: str = "embedding"

    @property
    def row_bytes(self) -> int:
        """Of one row's values."""
        return self.dim * self.dtype.itemsize

    def servers_of(self, rows: torch.Tensor, num_servers: int) -> torch.Tensor:
        """Which server has each row: the same everywhere. Neighbours, and rows that are used much, lie apart.

        >>> EmbeddingTableSpec(100, 4).servers_of(torch.arange(8), 2).tolist()
        [1, 1, 0, 0, 1, 0, 1, 1]
        """
        if num_servers == 1:
            return torch.zeros_like(rows)
        mixed = scramble(rows.numpy().view(np.uint64) ^ _DEALING) >> np.uint64(32)
        return torch.from_numpy((mixed * np.uint64(num_servers) >> np.uint64(32)).view(np.int64))
