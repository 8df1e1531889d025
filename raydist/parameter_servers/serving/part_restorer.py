"""The interface of a server's checkpoint reader; `raydist.checkpoints.sharing` implements it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from raydist.parameter_servers.serving.embedding_tables import ServedTable

__all__ = ["PartHolder", "PartRestorer"]


class PartHolder(Protocol):
    """The server's state as a restore sees it, for the time of one request."""

    def value(self, number: int, /) -> torch.Tensor:
        """Return a slice's values, which the next request may change. InvalidArgumentError if it was never created."""

    def state(self, optimizer: int, number: int, /) -> Mapping[str, Any]:
        """Return an optimizer's state of a slice, which the next request may change."""

    def optimizer_kind(self, handle: int, /) -> type[torch.optim.Optimizer]:
        """Return an optimizer's class. InvalidArgumentError if it was never added."""

    def table(self, handle: int, /) -> ServedTable:
        """Return an embedding table. InvalidArgumentError if it was never created."""

    def replace(
        self,
        tables: Mapping[int, ServedTable],
        values: Mapping[int, torch.Tensor],
        memories: Mapping[int, Mapping[int, Mapping[str, Any]]],
        /,
    ) -> None:
        """Replace present values, all or none: no reader sees a part of the change.

        Args:
            tables: Tables by handle.
            values: Values of slices, by number.
            memories: States by optimizer handle and slice number; the optimizer owns the tensors from now on.
        """


class PartRestorer(ABC):
    """Reads one server's part of checkpoints. The server's thread calls it."""

    @abstractmethod
    def begin(self, order: Any, held: PartHolder) -> None:
        """Begin to read in a background thread. An order that was begun before changes nothing.

        Args:
            order: The description of what to read; `report` tells errors.
            held: The server's state.
        """

    @abstractmethod
    def report(self, token: str) -> Any:
        """Return the outcome of a read; None until it is known."""

    @abstractmethod
    def commit(self, token: str, held: PartHolder) -> None:
        """Replace the values by the ones read. FailedPreconditionError if none were read, without a change."""

    @abstractmethod
    def discard(self) -> None:
        """Drop what was read, and what is being read."""

    @abstractmethod
    def close(self, within_s: float) -> None:
        """Discard, and wait for the thread."""
