"""What a server needs of whoever writes its part of checkpoints; `raydist.checkpoints.sharing` has that."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

__all__ = ["SliceHolder", "SliceSaver"]


class SliceHolder(Protocol):
    """What a server has, for the time of one request."""

    def value(self, number: int, /) -> torch.Tensor:
        """A slice's values, which the next request may change."""

    def state(self, optimizer: int, number: int, /) -> Mapping[str, Any]:
        """What an optimizer remembers of a slice, which the next request may change."""

    def table_state(self, handle: int, /) -> Mapping[str, Any]:
        """Copies of all rows of an embedding table that are here, and of what optimizers remember of them."""


class SliceSaver(ABC):
    """Writes one server's part of checkpoints."""

    @abstractmethod
    def begin(self, order: Any, tensors: Sequence[torch.Tensor], held: SliceHolder) -> None:
        """Copy what is asked for, and write it in a thread. An order that was carried out before changes nothing.

        Args:
            order: What is asked for; what goes wrong with it is told by `report`.
            tensors: Others that it speaks of; not kept once this returns.
            held: What the server has.
        """

    @abstractmethod
    def report(self, token: str) -> Any:
        """What became of a save; None while that is not known."""

    @abstractmethod
    def close(self, within_s: float) -> None:
        """Wait for what is being written."""
