"""The description of an embedding table, independent of where its rows lie."""

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
        num_rows: Number of rows; row numbers are below it.
        dim: Number of values in a row.
        dtype: Dtype of the values.
        seed: Together with a row's number, the seed determines the row's initial values.
        initializer: Distribution of initial values: normal with mean 0, uniform between -1 and 1, or zero.
        scale: Factor of the initial values.
        name: Name for messages.

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
        """Size of one row's values in bytes."""
        return self.dim * self.dtype.itemsize

    def servers_of(self, rows: torch.Tensor, num_servers: int) -> torch.Tensor:
        """Return the server of each row, the same everywhere. Neighbouring and frequent rows are spread over servers.

        >>> EmbeddingTableSpec(100, 4).servers_of(torch.arange(8), 2).tolist()
        [1, 1, 0, 0, 1, 0, 1, 1]
        """
        if num_servers == 1:
            return torch.zeros_like(rows)
        mixed = scramble(rows.numpy().view(np.uint64) ^ _DEALING) >> np.uint64(32)
        return torch.from_numpy((mixed * np.uint64(num_servers) >> np.uint64(32)).view(np.int64))
