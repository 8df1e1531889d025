"""The interface of a server's checkpoint writer; `raydist.checkpoints.sharing` implements it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

__all__ = ["SliceHolder", "SliceSaver"]


class SliceHolder(Protocol):
    """The server's state as a save sees it, for the time of one request."""

    def value(self, number: int, /) -> torch.Tensor:
        """Return a slice's values, which the next request may change."""

    def state(self, optimizer: int, number: int, /) -> Mapping[str, Any]:
        """Return an optimizer's state of a slice, which the next request may change."""

    def table_state(self, handle: int, /) -> Mapping[str, Any]:
        """Return copies of an embedding table's rows on this server, and of their optimizer states."""


class SliceSaver(ABC):
    """Writes one server's part of checkpoints."""

    @abstractmethod
    def begin(self, order: Any, tensors: Sequence[torch.Tensor], held: SliceHolder) -> None:
        """Copy the ordered values, and write them in a thread. An order that was carried out before changes nothing.

        Args:
            order: The description of what to write; `report` tells errors.
            tensors: Further tensors of the order; not kept after this returns.
            held: The server's state.
        """

    @abstractmethod
    def report(self, token: str) -> Any:
        """Return the outcome of a save; None until it is known."""

    @abstractmethod
    def close(self, within_s: float) -> None:
        """Wait for saves that are being written."""
