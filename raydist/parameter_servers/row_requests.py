"""What is asked of a parameter server about rows of embedding tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from raydist.parameter_servers.requests import Sender, ServerRequest

__all__ = ["CreateTable", "PullRows", "RowState", "SetRowState"]


@final
@dataclass(frozen=True, slots=True)
class CreateTable(ServerRequest):
    """Have this server's rows of an embedding table.

    Attributes:
        handle: What driver and workers call it.
        spec: An `EmbeddingTableSpec`.
    """

    handle: int
    spec: Any


@final
@dataclass(frozen=True, slots=True)
class PullRows(ServerRequest):
    """Give rows of a table, made where they are touched for the first time; tensors: int64 row numbers, unique."""

    handle: int
    sender: Sender | None = None


@final
@dataclass(frozen=True, slots=True)
class RowState(ServerRequest):
    """All rows that a table has, and what optimizers remember of them; see `RowTable.state`."""

    handle: int


@final
@dataclass(frozen=True, slots=True)
class SetRowState(ServerRequest):
    """Replace all rows of a table; `value`: what `RowTable.state` gave, of any number of servers."""

    handle: int
    value: Any
