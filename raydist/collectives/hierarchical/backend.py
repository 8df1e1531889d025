"""Groups of ranks on several hosts, some of which share memory."""

from __future__ import annotations

from typing import final

import torch

from raydist.collectives.backend import Backend, JoiningCommunicator
from raydist.collectives.base import Membership
from raydist.collectives.hierarchical.communicator import HierarchicalCommunicator
from raydist.collectives.shared_memory.communicator import SharedMemoryCommunicator

__all__ = ["HierarchicalBackend"]


@final
class HierarchicalBackend(Backend):
    """Shared memory inside hosts, connections between them; on a single host, shared memory."""

    name = "hierarchical"
    devices = ("cpu",)

    def declines(self, membership: Membership) -> str | None:
        if membership.hosts:
            return None
        return "nobody has said which of its ranks are on one host"

    def communicator(self, membership: Membership, device: torch.device, timeout_s: float) -> JoiningCommunicator:
        kind = HierarchicalCommunicator if len(set(membership.hosts)) > 1 else SharedMemoryCommunicator
        return kind(membership, device, timeout_s)
