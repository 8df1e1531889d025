"""The seam between our communicators and the process groups of torch.distributed that carry the data.

They are built directly on a store of our own: nothing here touches torch.distributed's process-wide default group.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from torch._C._distributed_c10d import Store

from raydist.collectives.backend import Backend
from raydist.collectives.base import Membership
from raydist.collectives.flights import Flight

__all__ = ["MARGIN_S", "ProcessGroupBackend", "RawGroup", "RawWork"]

RawGroup = Any
"""A c10d backend object (ProcessGroupGloo, ProcessGroupNCCL): torch's stubs leave out its collectives."""

RawWork = Any
"""What the collectives of a raw group return."""

MARGIN_S = 1.0
"""By how much a backend's own limit is longer than ours: it only bounds what an aborted operation leaves behind."""


class ProcessGroupBackend(Backend):
    """How a process group is made, and how its work is waited for.

    Attributes:
        host_runs_ahead: Waiting for work makes the device's stream wait, and not the host.
    """

    host_runs_ahead: ClassVar[bool] = False

    @abstractmethod
    def create(self, store: Store, membership: Membership, timeout_s: float) -> RawGroup:
        """Connect to the other members, which are known to have arrived.

        Raises:
            UnavailableError: This PyTorch, or this machine, does not have it.
        """

    @abstractmethod
    def collective(self, work: RawWork) -> Flight:
        """A collective that was started."""

    @abstractmethod
    def point_to_point(self, work: RawWork) -> Flight:
        """A send or receive that was started."""

    @abstractmethod
    def kill(self, group: RawGroup) -> None:
        """Stop what is under way, as far as the backend can."""
