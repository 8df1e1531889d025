"""What a server needs of whoever reads its part of checkpoints; `raydist.checkpoints.sharing` has that."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from raydist.parameter_servers.serving.embedding_tables import ServedTable

__all__ = ["PartHolder", "PartRestorer"]


class PartHolder(Protocol):
    """What a server has, for the time of one request."""

    def value(self, number: int, /) -> torch.Tensor:
        """A slice's values, which the next request may change. InvalidArgumentError where it was never created."""

    def state(self, optimizer: int, number: int, /) -> Mapping[str, Any]:
        """What an optimizer remembers of a slice, which the next request may change."""

    def optimizer_kind(self, handle: int, /) -> type[torch.optim.Optimizer]:
        """An optimizer's class. InvalidArgumentError where it was never added."""

    def table(self, handle: int, /) -> ServedTable:
        """One of them. InvalidArgumentError where it was never created."""

    def replace(
        self,
        tables: Mapping[int, ServedTable],
        values: Mapping[int, torch.Tensor],
        memories: Mapping[int, Mapping[int, Mapping[str, Any]]],
        /,
    ) -> None:
        """Have these in place of what there is, all or none: nobody reads a part of it.

        Args:
            tables: By handle.
            values: Of slices, by number.
            memories: By handle of an optimizer and number of a slice, what it remembers; tensors are its own now.
        """


class PartRestorer(ABC):
    """Reads one server's part of checkpoints. Used by the server's thread."""

    @abstractmethod
    def begin(self, order: Any, held: PartHolder) -> None:
        """Begin to read in a thread, beside what there is. An order that was begun before changes nothing.

        Args:
            order: What to read; what goes wrong with it is told by `report`.
            held: What the server has.
        """

    @abstractmethod
    def report(self, token: str) -> Any:
        """What became of it; None while that is not known."""

    @abstractmethod
    def commit(self, token: str, held: PartHolder) -> None:
        """Let the server have what was read. FailedPreconditionError where it was not; nothing is changed then."""

    @abstractmethod
    def discard(self) -> None:
        """Forget what was read, and what is being read."""

    @abstractmethod
    def close(self, within_s: float) -> None:
        """Discard, and wait for the thread."""
