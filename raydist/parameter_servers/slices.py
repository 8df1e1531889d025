"""Which part of which variable lies on which parameter server. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

__all__ = ["ServedSlice", "VariableSpec"]


@final
@dataclass(frozen=True, slots=True)
class VariableSpec:
    """A variable that is to be placed on servers.

    Attributes:
        handle: What the driver and all workers call it.
        name: Its name, for messages and for the names of its slices.
        shape: Its shape.
        dtype: Its dtype.
        partitioned: Whether it may be split along dimension 0: parameters may, buffers stay whole.
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
        number: Of the slice, unique in the strategy.
        handle: Of the variable.
        name: The variable's, with `/part_i` where that has several slices.
        server: Which server has it.
        begin: Its first row in the variable.
        shape: Its own shape: the variable's but for dimension 0; `()` for a scalar.
        dtype: Its dtype.
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
        """Of its values."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count * self.dtype.itemsize

    def within(self, variable: torch.Tensor) -> torch.Tensor:
        """The slice's view of its whole variable (or of a gradient of it)."""
        return variable if not self.shape else variable.narrow(0, self.begin, self.shape[0])
