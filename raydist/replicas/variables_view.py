"""What rules see of a replica: its mirrored objects, and the group of its peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from raydist.collectives.base import Communicator
from raydist.mirroring.on_replica.replica import MirrorReplica
from raydist.replicas.rules import ReplicaVariables
from raydist.values import ReduceOp

__all__ = ["VariablesView"]


@final
class VariablesView(ReplicaVariables):
    """One replica's objects and wire.

    Args:
        communicator: The group for values.
        mirror: This replica's objects.
        gather: Every replica's value of its argument, in rank order.
        rows: Of the batch at hand.
    """

    def __init__(
        self,
        communicator: Communicator,
        mirror: MirrorReplica,
        gather: Callable[[Any], list[Any]],
        rows: Callable[[], tuple[int, ...] | None],
    ) -> None:
        self.rank, self.num_replicas = communicator.rank, communicator.world_size
        self._communicator = communicator
        self._mirror = mirror
        self._gather = gather
        self._rows = rows

    @property
    def rows(self) -> tuple[int, ...] | None:
        return self._rows()

    def items(self) -> Sequence[tuple[int, Any]]:
        """Handles and mirrored objects of every kind, in an order that is the same on all replicas."""
        return self._mirror.items()

    @property
    def changes(self) -> int:
        """Another number once objects have come or gone."""
        return self._mirror.changes

    def take_loaded_states(self) -> frozenset[int]:
        """Handles of optimizers whose state the driver has replaced since this was asked last."""
        return self._mirror.take_loaded_states()

    def parameters(self) -> Sequence[torch.nn.Parameter]:
        return self._mirror.parameters()

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return self._mirror.updates.optimizers()

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp | str = ReduceOp.SUM) -> None:
        self._communicator.all_reduce(tensor, ReduceOp.parse(op)).wait()

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        self._communicator.broadcast(tensor, root).wait()

    def gather_numbers(self, about: str, *numbers: int) -> list[tuple[int, ...]]:
        mine = torch.tensor(numbers, device=self._communicator.device)
        rows = [torch.empty_like(mine) for _ in range(self.num_replicas)]
        self._communicator.announce(about)
        self._communicator.all_gather(rows, mine).wait()
        return [tuple(row.tolist()) for row in rows]

    def gather_objects(self, value: Any) -> list[Any]:
        return self._gather(value)
