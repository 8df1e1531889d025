"""What carries a group's data, as the table of backends knows it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, final

import torch

from raydist.collectives.base import Communicator, Membership

__all__ = ["Backend", "Declined", "JoiningCommunicator"]


@final
class Declined(Exception):
    """The members have agreed that this backend cannot carry their group; the message says why."""


class JoiningCommunicator(Communicator):
    """A communicator that has to meet the other members first."""

    @abstractmethod
    def start(self) -> None:
        """Join the group. Blocking: until every member has, at most `timeout_s`.

        Raises:
            DeadlineExceededError: A member did not arrive; the message says which.
            Declined: This backend cannot carry the group: on every rank alike, before anything was sent.
        """


class Backend(ABC):
    """How the ranks of a group on some kind of device are connected.

    A new one is a file of its own and a line in `backend_table.py`; the tests then ask for its ranks and check the
    contract of communicators on them.

    Attributes:
        name: What it is chosen by.
        devices: Kinds of devices that it serves: "cpu", "cuda", "xla".
    """

    name: ClassVar[str]
    devices: ClassVar[tuple[str, ...]]

    def declines(self, membership: Membership) -> str | None:
        """Why it cannot carry a group, as far as its membership tells; every member comes to the same answer."""
        return None

    @abstractmethod
    def communicator(self, membership: Membership, device: torch.device, timeout_s: float) -> JoiningCommunicator:
        """One rank's end of a group, which it has not joined yet."""
