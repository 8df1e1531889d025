"""What one replica can do together with the others, and the replica that is alone."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, final

import torch

from raydist.collectives.differentiable import promote
from raydist.values import ReduceOp

__all__ = ["Alone", "Peers"]


class Peers(ABC):
    """The other replicas, seen from one of them.

    Attributes:
        rank: This replica.
        world_size: All replicas.
        device: Where this replica computes.
        rows: Rows of the current distributed batch on each replica, None without a batch.
    """

    rank: int
    world_size: int
    device: torch.device
    rows: tuple[int, ...] | None

    @abstractmethod
    def all_reduce(self, op: ReduceOp, value: Any) -> Any:
        """One leaf of `ReplicaContext.all_reduce`."""

    @abstractmethod
    def all_gather(self, value: Any, axis: int) -> Any:
        """One leaf of `ReplicaContext.all_gather`."""

    @abstractmethod
    def merge_call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """This replica's part of `fn(*args, **kwargs)`, given a PerReplica of every replica's for each leaf.

        See `ReplicaContext.merge_call`, which has bound the strategy to `fn`.
        """

    @abstractmethod
    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backwards inside stay local."""


@final
class Alone(Peers):
    """The only replica: every collective is the identity."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.world_size, self.device = 0, 1, device
        self.rows = None

    def all_reduce(self, op: ReduceOp, value: Any) -> Any:
        return promote(torch.as_tensor(value, device=self.device), op)

    def all_gather(self, value: Any, axis: int) -> Any:
        return torch.as_tensor(value, device=self.device)

    def merge_call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return fn(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        yield
