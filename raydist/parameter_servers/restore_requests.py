"""Requests to restore a parameter server: it reads and checks its part first, and swaps it in once all servers have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from raydist.parameter_servers.requests import ServerRequest

__all__ = ["BeginRestore", "CommitRestore", "DiscardRestore", "ReadReport"]


@final
@dataclass(frozen=True, slots=True)
class BeginRestore(ServerRequest):
    """Read this server's part of a checkpoint in the background, and hold it aside. Drops what was held before.

    Attributes:
        order: An order for the `PartRestorer`.
    """

    order: Any


@final
@dataclass(frozen=True, slots=True)
class ReadReport(ServerRequest):
    """Return the state of the restore; answer: `value` is the result of `PartRestorer.report`."""

    token: str


@final
@dataclass(frozen=True, slots=True)
class CommitRestore(ServerRequest):
    """Replace the present values by the ones that were read."""

    token: str


@final
@dataclass(frozen=True, slots=True)
class DiscardRestore(ServerRequest):
    """Drop what was read, if anything."""
