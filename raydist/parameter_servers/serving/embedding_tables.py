"""What a server needs of an embedding table; `raydist.parameter_servers.rows` has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

__all__ = ["ServedTable", "TableMaker"]


TableMaker = Callable[[Any, int, int], "ServedTable"]
"""Given an `EmbeddingTableSpec`, the number of a server and how many there are: that server's rows."""


class ServedTable(Protocol):
    """One server's rows of a table."""

    @property
    def num_bytes(self) -> int:
        """Of all rows and of what optimizers remember of them."""

    def pull(self, rows: torch.Tensor, /) -> torch.Tensor:
        """Values of these rows (int64, unique), made where they are touched for the first time."""

    def push(
        self,
        rows: torch.Tensor,
        gradients: torch.Tensor,
        optimizer_kind: type[torch.optim.Optimizer],
        options: Mapping[str, Any],
        /,
    ) -> None:
        """Apply an optimizer of this class to these rows; gradients of one that comes twice are added up."""

    def require_optimizer(self, optimizer_kind: type[torch.optim.Optimizer], options: Mapping[str, Any], /) -> None:
        """An InvalidArgumentError unless `push` will take this optimizer."""

    def state(self) -> dict[str, Any]:
        """All rows, and what optimizers remember of them."""

    def anew(self) -> ServedTable:
        """A table for the same rows, of which none exists yet."""

    def load(self, states: Sequence[Mapping[str, Any]], /) -> None:
        """Have those rows of these states that belong here, and no others."""
