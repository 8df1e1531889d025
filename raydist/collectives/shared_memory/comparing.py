"""What groups share whose ranks compare their calls in memory: the texts of calls, and how a generation follows."""

from __future__ import annotations

from abc import abstractmethod
from typing import Final, final

import torch

from raydist.collectives.backend import JoiningCommunicator
from raydist.collectives.base import ALL_REDUCE, Membership, Work
from raydist.collectives.parts import check_rank
from raydist.collectives.shared_memory.calls import CallTexts
from raydist.collectives.translation import describe_operation
from raydist.errors import FailedPreconditionError
from raydist.values import ReduceOp

__all__ = ["ComparingCommunicator"]


class ComparingCommunicator(JoiningCommunicator):
    """Ranks whose collectives compare what is called. Not for use by several threads at once, `abort` aside.

    Args:
        membership: This rank's place.
        device: Of the CPU.
        timeout_s: The limit of every wait.
    """

    checks_itself: Final = True
    passes_notes: Final = True

    def __init__(self, membership: Membership, device: torch.device, timeout_s: float) -> None:
        self.membership = membership
        self.device = device
        self.timeout_s = timeout_s
        self._calls = CallTexts()
        self._prepare()

    @abstractmethod
    def _prepare(self) -> None:
        """Make what a generation begins with, of the membership; nobody is met yet."""

    @abstractmethod
    def _reduce(self, name: str, tensor: torch.Tensor, op: ReduceOp, *, everywhere: bool) -> Work:
        """Start a reduction under this name, whose result is wanted on this rank, or not."""

    @final
    def note(self) -> None:
        self._calls.note()

    @final
    def announce(self, what: str) -> None:
        self._calls.announce(what)

    @final
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Work:
        return self._reduce(ALL_REDUCE[op], tensor, op, everywhere=True)

    @final
    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp) -> Work:
        self._check_rank("root", root)
        return self._reduce(f"reduce({op.value}, root={root})", tensor, op, everywhere=self.rank == root)

    @final
    def reconfigure(self, membership: Membership) -> None:
        self.membership.check_successor(membership)
        self.abort()
        self.close()
        self.membership = membership
        self._prepare()
        self.start()

    def _check_rank(self, role: str, rank: int) -> None:
        check_rank(role, rank, self.membership)

    def _closed(self, operation: str) -> FailedPreconditionError:
        """For who calls something in a group that was left."""
        return FailedPreconditionError(
            f"{describe_operation(self.membership, operation)}: the group is closed. Open a new one."
        )
