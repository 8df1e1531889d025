"""Requests to a parameter server about rows of embedding tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from raydist.parameter_servers.requests import Sender, ServerRequest

__all__ = ["CreateTable", "PullRows", "RowState", "SetRowState"]


@final
@dataclass(frozen=True, slots=True)
class CreateTable(ServerRequest):
    """Create this server's rows of an embedding table.

    Attributes:
        handle: Handle of the table, the same on the driver and all workers.
        spec: An `EmbeddingTableSpec`.
    """

    handle: int
    spec: Any


@final
@dataclass(frozen=True, slots=True)
class PullRows(ServerRequest):
    """Read rows of a table; rows are made when first touched. Tensors: int64 row numbers, unique."""

    handle: int
    sender: Sender | None = None


@final
@dataclass(frozen=True, slots=True)
class RowState(ServerRequest):
    """Read all rows of a table, and their optimizer states; see `RowTable.state`."""

    handle: int


@final
@dataclass(frozen=True, slots=True)
class SetRowState(ServerRequest):
    """Replace all rows of a table; `value`: results of `RowTable.state`, of any number of servers."""

    handle: int
    value: Any
