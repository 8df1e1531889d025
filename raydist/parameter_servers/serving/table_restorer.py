"""What a server needs of whoever reads its part of checkpoints; `raydist.checkpoints.sharing` has that."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

from raydist.parameter_servers.serving.embedding_tables import ServedTable

__all__ = ["TableHolder", "TableRestorer"]


class TableHolder(Protocol):
    """The embedding tables that a server has, for the time of one request."""

    def table(self, handle: int, /) -> ServedTable:
        """One of them. InvalidArgumentError where it was never created."""

    def replace_tables(self, tables: Mapping[int, ServedTable], /) -> None:
        """Have these by their handles, all or none, in place of those that there are."""


class TableRestorer(ABC):
    """Reads one server's part of checkpoints. Used by the server's thread."""

    @abstractmethod
    def begin(self, order: Any, held: TableHolder) -> None:
        """Begin to read in a thread, beside the tables that there are. An order that was begun before changes nothing.

        Args:
            order: What to read; what goes wrong with it is told by `report`.
            held: What the server has.
        """

    @abstractmethod
    def report(self, token: str) -> Any:
        """What became of it; None while that is not known."""

    @abstractmethod
    def commit(self, token: str, held: TableHolder) -> None:
        """Let the server have what was read. FailedPreconditionError where it was not; nothing is changed then."""

    @abstractmethod
    def discard(self) -> None:
        """Forget what was read, and what is being read."""

    @abstractmethod
    def close(self, within_s: float) -> None:
        """Discard, and wait for the thread."""
