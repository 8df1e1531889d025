"""What parameter servers are told of a restore."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from raydist.checkpoints.saved_checkpoint import SavedCheckpoint

__all__ = ["RestoreOrder", "StoredTable"]


@final
@dataclass(frozen=True, slots=True)
class StoredTable:
    """An embedding table, and where a checkpoint has its rows.

    Attributes:
        handle: What servers call it.
        saved: The object of the checkpoint that has the rows of its module's tables.
        path: Of the table in that module.
    """

    handle: int
    saved: str
    path: str


@final
@dataclass(frozen=True, slots=True)
class RestoreOrder:
    """What every server is to do of a restore: all the same, each with the rows that it owns.

    Attributes:
        token: Tells it from others.
        checkpoint: What concerns them of it.
        tables: Those to read.
    """

    token: str
    checkpoint: SavedCheckpoint
    tables: tuple[StoredTable, ...]
