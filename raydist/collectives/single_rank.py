"""The communicator of a group with a single rank: every collective is the identity."""

from __future__ import annotations

from typing import final

import torch

from raydist.collectives.base import Communicator, FinishingWork, Membership, Work
from raydist.collectives.tensors import check_parts, check_reducible, check_root
from raydist.core.values import ReduceOp


@final
class SingleRank(Communicator):
    """The only rank of a group. Checks arguments as larger groups do.

    >>> tensor = torch.tensor([1.0, 2.0])
    >>> SingleRank(Membership("g", generation=0, rank=0, world_size=1)).all_reduce(tensor, ReduceOp.MEAN).wait()
    >>> tensor.tolist()
    [1.0, 2.0]
    """

    def __init__(self, membership: Membership, device: torch.device | None = None, timeout_s: float = 60.0) -> None:
        self.membership = membership
        self.device = device or torch.device("cpu")
        self.timeout_s = timeout_s

    def exchange_on_host(self, data: bytes, what: str) -> list[bytes]:
        return [data]

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Work:
        check_reducible(tensor.dtype, op)
        return _done()

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        check_parts("all_gather", outputs, tensor, self.world_size)
        outputs[0].detach().copy_(tensor.detach())
        return _done()

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        check_root(root, self.membership.group, self.world_size)
        return _done()

    def abort(self) -> None:
        """Do nothing: no collective is ever pending."""

    def close(self) -> None:
        """Do nothing: the group holds no resources."""


def _done() -> Work:
    return FinishingWork(lambda limit_s: None)
