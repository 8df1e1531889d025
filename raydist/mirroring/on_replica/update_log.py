"""The log of a replica's optimizer steps, sent with each backward pass, so that diverging replicas are noticed."""

from __future__ import annotations

from typing import final

import torch

from raydist.mirroring.handles import ReplicaTable

__all__ = ["UpdateLog"]


@final
class UpdateLog:
    """Steps and learning rates of the mirrored optimizers of one replica.

    Args:
        table: Where they are found.

    Attributes:
        count: Steps since the log was begun, or begun again.
    """

    def __init__(self, table: ReplicaTable) -> None:
        self.count = 0
        self._table = table
        self._looked_at = -1
        self._optimizers: list[torch.optim.Optimizer] = []

    def note(self) -> None:
        """An optimizer steps."""
        self.count += 1

    def restart(self) -> None:
        """Count from 0 again: all replicas hold the same now."""
        self.count = 0

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """All of them, in an order that is the same on every replica."""
        if self._looked_at != self._table.changes:
            self._looked_at = self._table.changes
            self._optimizers = [obj for _, obj in self._table.items() if isinstance(obj, torch.optim.Optimizer)]
        return self._optimizers

    def rates(self) -> tuple[float, ...]:
        """The learning rates of all groups of all optimizers; those that lie on another device are passed over."""
        rates = [group.get("lr") for optimizer in self.optimizers() for group in optimizer.param_groups]
        # Reading a number from a GPU would wait for all that was sent there.
        return tuple(float(rate) for rate in rates if rate is not None and not getattr(rate, "is_cuda", False))
