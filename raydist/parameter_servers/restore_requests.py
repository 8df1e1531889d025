"""What is asked of a parameter server about what it restores: read and checked first, swapped in once all have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from raydist.parameter_servers.requests import ServerRequest

__all__ = ["BeginRestore", "CommitRestore", "DiscardRestore", "ReadReport"]


@final
@dataclass(frozen=True, slots=True)
class BeginRestore(ServerRequest):
    """Read this server's part of a checkpoint beside all else, and hold it aside. What was held before is forgotten.

    Attributes:
        order: What a `PartRestorer` takes.
    """

    order: Any


@final
@dataclass(frozen=True, slots=True)
class ReadReport(ServerRequest):
    """Say what has become of that; answer: `value` is what `PartRestorer.report` gives."""

    token: str


@final
@dataclass(frozen=True, slots=True)
class CommitRestore(ServerRequest):
    """Have what was read, in place of what there is."""

    token: str


@final
@dataclass(frozen=True, slots=True)
class DiscardRestore(ServerRequest):
    """Forget what was read, if anything was."""
