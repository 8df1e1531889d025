"""The interfaces of a server's checkpoint writer and reader; `raydist.checkpoints` implements them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from raydist.parameter_servers.row_table import RowTable


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


class PartHolder(Protocol):
    """The server's state as a restore sees it, for the time of one request."""

    def value(self, number: int, /) -> torch.Tensor:
        """Return a slice's values, which the next request may change. InvalidArgumentError if it was never created."""

    def state(self, optimizer: int, number: int, /) -> Mapping[str, Any]:
        """Return an optimizer's state of a slice, which the next request may change."""

    def optimizer_kind(self, handle: int, /) -> type[torch.optim.Optimizer]:
        """Return an optimizer's class. InvalidArgumentError if it was never added."""

    def table(self, handle: int, /) -> RowTable:
        """Return an embedding table. InvalidArgumentError if it was never created."""

    def replace(
        self,
        tables: Mapping[int, RowTable],
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
