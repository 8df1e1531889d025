"""Variables and their slices on parameter servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

__all__ = ["ServedSlice", "VariableSpec"]


@final
@dataclass(frozen=True, slots=True)
class VariableSpec:
    """A variable to be placed on servers.

    Attributes:
        handle: Handle of the variable, the same on the driver and all workers.
        name: Name of the variable, for messages and for the names of its slices.
        shape: Shape of the variable.
        dtype: Dtype of the variable.
        partitioned: True to allow a split along dimension 0: parameters may be split, buffers stay whole.
    """

    handle: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    partitioned: bool = True


@final
@dataclass(frozen=True, slots=True)
class ServedSlice:
    """Consecutive rows of a variable, all of which lie on one server.

    Attributes:
        number: Number of the slice, unique in the strategy.
        handle: Handle of the variable.
        name: Name of the variable, with `/part_i` if the variable has several slices.
        server: Number of the server that has the slice.
        begin: First row of the slice in the variable.
        shape: Shape of the slice: as the variable's but for dimension 0; `()` for a scalar.
        dtype: Dtype of the variable.
    """

    number: int
    handle: int
    name: str
    server: int
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the slice's values in bytes."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count * self.dtype.itemsize

    def within(self, variable: torch.Tensor) -> torch.Tensor:
        """Return the slice's view of its whole variable (or of the variable's gradient)."""
        return variable if not self.shape else variable.narrow(0, self.begin, self.shape[0])
