"""A communicator around another one: what all kinds of them leave to it, and the one that only changes limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from raydist.collectives.base import Communicator, Membership, Work
from raydist.values import ReduceOp

__all__ = ["DelegatingCommunicator", "LimitedCommunicator"]


class DelegatingCommunicator(Communicator):
    """Adds to the collectives of another communicator; messages and the life of the group stay its affair.

    Args:
        inner: Does the work; it belongs to this object from now on.
        device: Where its tensors are.
    """

    def __init__(self, inner: Communicator, device: torch.device) -> None:
        self._inner = inner
        self.device = device

    @property
    def membership(self) -> Membership:  # type: ignore[override]  # a view of the inner one's
        return self._inner.membership

    @property
    def timeout_s(self) -> float:  # type: ignore[override]  # a view of the inner one's
        return self._inner.timeout_s

    @property
    def checks_itself(self) -> bool:
        return self._inner.checks_itself

    @property
    def passes_notes(self) -> bool:
        return self._inner.passes_notes

    def note(self) -> None:
        self._inner.note()

    def announce(self, what: str) -> None:
        self._inner.announce(what)

    def send(self, tensor: torch.Tensor, destination: int) -> Work:
        return self._inner.send(tensor, destination)

    def recv(self, tensor: torch.Tensor, source: int) -> Work:
        return self._inner.recv(tensor, source)

    def reconfigure(self, membership: Membership) -> None:
        self._inner.reconfigure(membership)

    def abort(self) -> None:
        self._inner.abort()

    def close(self) -> None:
        self._inner.close()


@final
class LimitedCommunicator(DelegatingCommunicator):
    """Another communicator, whose collectives end after `limit_s`.

    Args:
        inner: Does the work, and goes on to belong to whom it belongs to.
        limit_s: Of each wait, in seconds; that of a barrier stays the inner one's.
    """

    def __init__(self, inner: Communicator, limit_s: float) -> None:
        super().__init__(inner, inner.device)
        self._limit_s = limit_s

    @property
    def timeout_s(self) -> float:  # type: ignore[override]  # as in the base class
        return self._limit_s

    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        return self._inner.allocate(sizes)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Work:
        return _LimitedWork(self._inner.all_reduce(tensor, op), self._limit_s)

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        return _LimitedWork(self._inner.all_gather(outputs, tensor), self._limit_s)

    def all_gather_rows(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        return _LimitedWork(self._inner.all_gather_rows(outputs, tensor), self._limit_s)

    def all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Work:
        return _LimitedWork(self._inner.all_to_all(outputs, inputs), self._limit_s)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        return _LimitedWork(self._inner.broadcast(tensor, root), self._limit_s)

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp) -> Work:
        return _LimitedWork(self._inner.reduce(tensor, root, op), self._limit_s)

    def reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor], op: ReduceOp) -> Work:
        return _LimitedWork(self._inner.reduce_scatter(output, inputs, op), self._limit_s)

    def barrier(self) -> None:
        self._inner.barrier()


@final
class _LimitedWork(Work):
    """A collective under way."""

    def __init__(self, work: Work, limit_s: float) -> None:
        self._work = work
        self._limit_s = limit_s

    def wait(self, timeout_s: float | None = None) -> None:
        self._work.wait(self._limit_s if timeout_s is None else timeout_s)
