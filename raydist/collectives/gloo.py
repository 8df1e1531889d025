"""Groups over TCP between processes on the CPU."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from raydist.collectives.base import Membership
from raydist.collectives.flights import Flight, GlooFlight, ThreadFlight
from raydist.collectives.process_group import ProcessGroupCommunicator
from raydist.collectives.process_group_backend import MARGIN_S, ProcessGroupBackend, RawGroup
from raydist.collectives.rendezvous import local_address

__all__ = ["GlooBackend"]


@final
class GlooBackend(ProcessGroupBackend):
    """TCP between processes."""

    name = "gloo"
    devices = ("cpu",)

    def communicator(self, membership: Membership, device: torch.device, timeout_s: float) -> ProcessGroupCommunicator:
        return ProcessGroupCommunicator(membership, device, timeout_s, self)

    def create(self, store: Store, membership: Membership, timeout_s: float) -> RawGroup:
        gloo: Any = ProcessGroupGloo  # torch's stubs do not know its `_Options`
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s + MARGIN_S)
        options._devices = [gloo.create_device(hostname=local_address(membership), lazy_init=False)]
        return gloo(store, membership.rank, membership.world_size, options)

    def collective(self, work: dist.Work) -> Flight:
        return GlooFlight(work)

    def point_to_point(self, work: dist.Work) -> Flight:
        return ThreadFlight(work).start()

    def kill(self, group: RawGroup) -> None:
        """Nothing: gloo cannot be stopped; its threads end when a peer closes or its limit is over."""
