"""Reduction on one rank, in the order of ranks, and a broadcast of its result: slow, plain, and the same everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch

from raydist.collectives.base import Communicator, Membership, Work
from raydist.collectives.delegating import DelegatingCommunicator
from raydist.collectives.reducing import COMBINERS
from raydist.collectives.wire import check_reducible
from raydist.errors import SpecError
from raydist.values import ReduceOp

__all__ = ["RootReduction", "ReducingToOne"]

Accumulate = Callable[[Sequence[torch.Tensor]], torch.Tensor]


@final
@dataclass(frozen=True, slots=True)
class RootReduction:
    """Where tensors are added up, and how.

    Attributes:
        root: The rank.
        function: Makes a sum of a list of tensors, in the order of ranks; None: they are added one after the other.
    """

    root: int
    function: Accumulate | None = None


@final
class ReducingToOne(DelegatingCommunicator):
    """Another communicator whose `all_reduce` is done by one rank. At most one is under way at a time.

    Args:
        inner: Carries the tensors; it belongs to this object from now on.
        accumulation: Where and how.
    """

    def __init__(self, inner: Communicator, accumulation: RootReduction) -> None:
        super().__init__(inner, inner.device)
        self._accumulation = accumulation
        self._under_way: _Reduction | None = None

    def around(self, what: str, tensor: torch.Tensor | None, start: Callable[[], Work]) -> Work:
        self._settle()
        return start()

    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        self._settle()
        return self._inner.allocate(sizes)

    def exchange_on_host(self, data: bytes, what: str) -> list[bytes]:
        self._settle()
        return self._inner.exchange_on_host(data, what)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Work:
        check_reducible(tensor.dtype, op)
        self._settle()
        self._under_way = _Reduction(self._inner, tensor.detach(), op, self._accumulation)
        return self._under_way

    def barrier(self) -> None:
        self._settle()
        self._inner.barrier()

    def reconfigure(self, membership: Membership) -> None:
        self._under_way = None
        super().reconfigure(membership)

    def _settle(self) -> None:
        """Wait for the reduction under way: all ranks call the other communicator in one order."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.wait()


@final
class _Reduction(Work):
    """One all-reduce: parts go to the root at once, the result comes when it is waited for."""

    def __init__(self, inner: Communicator, tensor: torch.Tensor, op: ReduceOp, accumulation: RootReduction) -> None:
        self._inner = inner
        self._tensor = tensor
        self._op = op
        self._accumulation = accumulation
        self._parts = [tensor]
        self._gathering: list[Work] | None = self._gather()

    def _gather(self) -> list[Work]:
        inner, root = self._inner, self._accumulation.root
        if inner.rank != root:
            return [inner.send(self._tensor, root)]
        ranks = range(inner.world_size)
        self._parts = [self._tensor if rank == root else torch.empty_like(self._tensor) for rank in ranks]
        return [inner.recv(part, rank) for rank, part in enumerate(self._parts) if rank != root]

    def wait(self, timeout_s: float | None = None) -> None:
        if self._gathering is None:
            return
        for work in self._gathering:
            work.wait(timeout_s)
        self._gathering = None
        if self._inner.rank == self._accumulation.root:
            self._tensor.copy_(self._reduced(self._parts))
        self._parts = []
        self._inner.broadcast(self._tensor, self._accumulation.root).wait()

    def _reduced(self, parts: list[torch.Tensor]) -> torch.Tensor:
        function = self._accumulation.function
        if function is None or self._op not in (ReduceOp.SUM, ReduceOp.MEAN):
            result = parts[0]
            for part in parts[1:]:
                result = COMBINERS[self._op](result, part)
        else:
            result = function(parts)
            if not isinstance(result, torch.Tensor) or (result.shape, result.dtype) != (
                self._tensor.shape,
                self._tensor.dtype,
            ):
                raise SpecError(
                    f"accumulation_fn must return one tensor like those it is given ({self._tensor.dtype} "
                    f"{tuple(self._tensor.shape)}), got {result!r:.200}. Return their sum."
                )
        return result / len(parts) if self._op is ReduceOp.MEAN else result
