"""Buffers that replicas agree on after each batch: `rd.set_aggregation(..., synchronization="on_write")`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, final

import torch

from raydist.mirroring.buffers.shares import aggregate, wide
from raydist.mirroring.shipment import overwrite

__all__ = ["WrittenBuffers"]


class _Mirror(Protocol):
    """The part of a replica's variables that is needed here."""

    def written_buffers(self) -> list[tuple[torch.Tensor, str]]:
        """The buffers, and how their values meet."""


@final
class WrittenBuffers:
    """Brings the buffers of one replica in line with the others', once a batch. Costs nothing where there are none.

    Args:
        mirror: The replica's variables.
        gather_all: Every replica's rows of a tensor, one below the other; all replicas call it together.

    Attributes:
        are_any: Whether there were any when the batch at hand began.
    """

    def __init__(self, mirror: _Mirror, gather_all: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._mirror = mirror
        self._gather_all = gather_all
        self._before: list[torch.Tensor] = []
        self.are_any = False

    def begin(self) -> None:
        """A batch begins: what is added to a buffer is added to what it holds now."""
        written = self._mirror.written_buffers()
        self._before = [buffer.detach().clone() for buffer, _ in written]
        self.are_any = bool(written)

    def agree(self, present: Sequence[bool]) -> None:
        """The batch is done: give every replica what all of them wrote.

        Args:
            present: Which replicas count, by rank.
        """
        if not self._before:
            return
        for (buffer, how), before in zip(self._mirror.written_buffers(), self._before, strict=True):
            rows = self._gather_all(buffer.detach().unsqueeze(0))
            values = [row for row, counts in zip(rows, present, strict=True) if counts]
            overwrite(buffer, _agreed(values, before, how))


def _agreed(values: list[torch.Tensor], before: torch.Tensor, how: str) -> torch.Tensor:
    """Of a sum it is what replicas added that adds up, so that a batch in which nobody writes changes nothing.

    >>> _agreed([torch.tensor(11), torch.tensor(12)], torch.tensor(10), "sum")
    tensor(13)
    """
    if how != "sum" or len(values) == 1:
        return aggregate(values, how)
    held = wide(before)
    return aggregate([held, *(wide(value) - held for value in values)], "sum").to(before.dtype)
