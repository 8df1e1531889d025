"""The interface of embedding tables for a server; `raydist.parameter_servers.rows` implements it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

__all__ = ["ServedTable", "TableMaker"]


TableMaker = Callable[[Any, int, int], "ServedTable"]
"""Makes a server's rows, given an `EmbeddingTableSpec`, the number of the server and the number of servers."""


class ServedTable(Protocol):
    """The rows of a table on one server."""

    @property
    def num_bytes(self) -> int:
        """Size of all rows and of their optimizer states in bytes."""

    def pull(self, rows: torch.Tensor, /) -> torch.Tensor:
        """Return values of these rows (int64, unique); rows are made when first touched."""

    def push(
        self,
        rows: torch.Tensor,
        gradients: torch.Tensor,
        optimizer_kind: type[torch.optim.Optimizer],
        options: Mapping[str, Any],
        /,
    ) -> None:
        """Apply an optimizer of this class to these rows; gradients of a repeated row are added up."""

    def require_optimizer(self, optimizer_kind: type[torch.optim.Optimizer], options: Mapping[str, Any], /) -> None:
        """Raise InvalidArgumentError unless `push` accepts this optimizer."""

    def state(self) -> dict[str, Any]:
        """Return all rows, and their optimizer states."""

    def anew(self) -> ServedTable:
        """Return an empty table for the same rows."""

    def load(self, states: Sequence[Mapping[str, Any]], /) -> None:
        """Replace all rows by this server's rows of these states."""
