"""A communicator around another one: what both kinds of them leave to it."""

from __future__ import annotations

import torch

from raydist.collectives.base import Communicator, Membership, Work

__all__ = ["DelegatingCommunicator"]


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
