"""Operations of one replica together with its peers, and the replica without peers."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, final

import torch

from raydist.collectives.differentiable import promote, require_axis
from raydist.collectives.reducer.reducer import GradientReducer
from raydist.options import CommunicationOptions
from raydist.values import ReduceOp

__all__ = ["Alone", "Peers"]


class Peers(ABC):
    """The other replicas, as seen from one of them.

    Attributes:
        rank: Rank of this replica.
        world_size: Number of replicas.
        device: Device of this replica.
        rows: Rows of the current distributed batch on each replica, None without a batch.
        implementation: The requested implementation of collectives, see `CommunicationOptions`.
        loop: The object that draws batches in this run; None if the step gets its batches as arguments.
    """

    rank: int
    world_size: int
    device: torch.device
    rows: tuple[int, ...] | None
    implementation: str = "auto"
    loop: Any = None

    @abstractmethod
    def all_reduce(self, op: ReduceOp, value: Any, options: CommunicationOptions | None = None) -> Any:
        """Reduce one leaf of `ReplicaContext.all_reduce`."""

    @abstractmethod
    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Gather one leaf of `ReplicaContext.all_gather`."""

    @abstractmethod
    def merge_call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return this replica's part of `fn(*args, **kwargs)`, with a PerReplica of all replicas' leaves for each leaf.

        `ReplicaContext.merge_call` has bound the strategy to `fn`.
        """

    @abstractmethod
    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backward passes keep gradients local."""


@final
class Alone(Peers):
    """The only replica: every collective is the identity.

    Args:
        device: Device of the replica.
        reducer: Checks the gradients of the replica; None for no checks.
    """

    def __init__(self, device: torch.device, reducer: GradientReducer | None = None) -> None:
        self._reducer = reducer
        self.rank, self.world_size, self.device = 0, 1, device
        self.rows = None

    def all_reduce(self, op: ReduceOp, value: Any, options: CommunicationOptions | None = None) -> Any:
        return promote(torch.as_tensor(value, device=self.device), op)

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        tensor = torch.as_tensor(value, device=self.device)
        require_axis(tensor, axis)
        return tensor

    def merge_call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return fn(*args, **kwargs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._reducer is None else self._reducer.no_sync()
