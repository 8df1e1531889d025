"""Communicators around another one: the base class of all, and the one that changes limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch

from raydist.collectives.base import ALL_REDUCE, Communicator, Membership, Work
from raydist.collectives.parts import rows_name
from raydist.values import ReduceOp

__all__ = ["DelegatingCommunicator", "LimitedCommunicator"]


class DelegatingCommunicator(Communicator):
    """Adds to the collectives of another communicator, by `around`; messages and the group's life are the other one's.

    Args:
        inner: Does the work; it belongs to this object from now on.
        device: Where its tensors are.
    """

    def __init__(self, inner: Communicator, device: torch.device) -> None:
        self._inner = inner
        self.device = device

    def around(self, what: str, tensor: torch.Tensor | None, start: Callable[[], Work]) -> Work:
        """Start a collective.

        Args:
            what: The collective and its arguments: "all_reduce(SUM)".
            tensor: A tensor of the dtype and shape that all ranks must give.
            start: Starts it in the other communicator.
        """
        return start()

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
    def host_runs_ahead(self) -> bool:
        return self._inner.host_runs_ahead

    def announce(self, what: str) -> None:
        self._inner.announce(what)

    def copy_to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        return self._inner.copy_to_host(tensor)

    def exchange_on_host(self, data: bytes, what: str) -> list[bytes]:
        return self._inner.exchange_on_host(data, what)

    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        return self._inner.allocate(sizes)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Work:
        return self.around(ALL_REDUCE[op], tensor, lambda: self._inner.all_reduce(tensor, op))

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        return self.around("all_gather", tensor, lambda: self._inner.all_gather(outputs, tensor))

    def all_gather_rows(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        return self.around(rows_name(outputs), tensor[:0], lambda: self._inner.all_gather_rows(outputs, tensor))

    def all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Work:
        one = inputs[0] if inputs else None
        return self.around("all_to_all", one, lambda: self._inner.all_to_all(outputs, inputs))

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        return self.around(f"broadcast(root={root})", tensor, lambda: self._inner.broadcast(tensor, root))

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp) -> Work:
        what = f"reduce({op.value}, root={root})"
        return self.around(what, tensor, lambda: self._inner.reduce(tensor, root, op))

    def reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor], op: ReduceOp) -> Work:
        what = f"reduce_scatter({op.value})"
        return self.around(what, output, lambda: self._inner.reduce_scatter(output, inputs, op))

    def send(self, tensor: torch.Tensor, destination: int) -> Work:
        return self._inner.send(tensor, destination)

    def recv(self, tensor: torch.Tensor, source: int) -> Work:
        return self._inner.recv(tensor, source)

    def barrier(self) -> None:
        self._inner.barrier()

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
        inner: Does the work, and goes on to belong to its owner.
        limit_s: Of each wait, in seconds; that of a barrier stays the inner one's.
    """

    def __init__(self, inner: Communicator, limit_s: float) -> None:
        super().__init__(inner, inner.device)
        self._limit_s = limit_s

    @property
    def timeout_s(self) -> float:  # type: ignore[override]  # as in the base class
        return self._limit_s

    def around(self, what: str, tensor: torch.Tensor | None, start: Callable[[], Work]) -> Work:
        return _LimitedWork(start(), self._limit_s)


@final
class _LimitedWork(Work):
    """A collective under way."""

    def __init__(self, work: Work, limit_s: float) -> None:
        self._work = work
        self._limit_s = limit_s

    def wait(self, timeout_s: float | None = None) -> None:
        self._work.wait(self._limit_s if timeout_s is None else timeout_s)
