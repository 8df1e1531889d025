"""What is small enough to go along when hosts agree on a call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import final

import torch

from raydist.collectives.hierarchical.lane import HostReduction
from raydist.collectives.hierarchical.plan import HostPlan

__all__ = ["SmallBroadcast", "SmallGather", "SmallLoad", "SmallReduction"]


class SmallLoad(ABC):
    """What hosts bring to a call, and what their leaders make of it.

    Attributes:
        numel: Of the result.
        dtype: Of what is brought, and of the result.
        num_bytes: What this host brings.
        place: Where in the segment the leader leaves the result; in its slot where this is None.
    """

    numel: int
    dtype: torch.dtype
    num_bytes: int
    place: int | None = None

    @abstractmethod
    def bring(self, out: torch.Tensor) -> None:
        """Fill `out` with what this host brings. Called on the leader."""

    @abstractmethod
    def conclude(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Make the result of what each host brings, in their order. Called on the leader."""


@final
class SmallReduction(SmallLoad):
    """Reducing what all ranks bring, of equal length.

    Args:
        like: One of them.
        reduction: How.
        rows: Gives what the ranks of this host bring, as the rows of one tensor.
        place: See `SmallLoad`.
    """

    def __init__(
        self, like: torch.Tensor, reduction: HostReduction, rows: Callable[[], torch.Tensor], place: int | None
    ) -> None:
        self.numel, self.dtype, self.num_bytes = like.numel(), like.dtype, like.nbytes
        self.place = place
        self._reduction = reduction
        self._rows = rows

    def bring(self, out: torch.Tensor) -> None:
        self._reduction.rows_at_home(self._rows(), out)

    def conclude(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        self._reduction.between(parts, out)


@final
class SmallBroadcast(SmallLoad):
    """Handing out the bytes of one rank.

    Args:
        plan: Who is on which host.
        size: How many bytes it has.
        root: That rank.
        brought: Gives what it has brought, on its host.
    """

    def __init__(self, plan: HostPlan, size: int, root: int, brought: Callable[[], torch.Tensor]) -> None:
        self.numel, self.dtype = size, torch.uint8
        self.num_bytes = size if root in plan.members else 0
        self._host = plan.host_of(root)
        self._brought = brought

    def bring(self, out: torch.Tensor) -> None:
        if self.num_bytes:
            out.copy_(self._brought())

    def conclude(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        out.copy_(parts[self._host])


@final
class SmallGather(SmallLoad):
    """Collecting the bytes of all ranks, host by host.

    Args:
        plan: Who is on which host.
        size: How many bytes each has.
        rows: Gives what the ranks of this host bring, as the rows of one tensor.
    """

    def __init__(self, plan: HostPlan, size: int, rows: Callable[[], torch.Tensor]) -> None:
        self.numel, self.dtype = size * sum(map(len, plan.hosts)), torch.uint8
        self.num_bytes = size * len(plan.members)
        self._rows = rows

    def bring(self, out: torch.Tensor) -> None:
        rows = self._rows()
        out.view(rows.shape).copy_(rows)

    def conclude(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        torch.cat(list(parts), out=out)
