"""Groups whose ranks are on one machine."""

from __future__ import annotations

from typing import final

import torch

from raydist.collectives.backend import Backend
from raydist.collectives.base import Membership
from raydist.collectives.shared_memory.communicator import SharedMemoryCommunicator

__all__ = ["SharedMemoryBackend"]


@final
class SharedMemoryBackend(Backend):
    """A segment of memory that all ranks have mapped; declined where they cannot, or are known to be on several hosts.

    Who names hosts decides: ranks with different ones share nothing, even where they could.
    """

    name = "shm"
    devices = ("cpu",)

    def declines(self, membership: Membership) -> str | None:
        hosts = tuple(dict.fromkeys(membership.hosts))
        return f"its ranks are on {len(hosts)} hosts ({', '.join(hosts[:3])}, ...)" if len(hosts) > 1 else None

    def communicator(self, membership: Membership, device: torch.device, timeout_s: float) -> SharedMemoryCommunicator:
        return SharedMemoryCommunicator(membership, device, timeout_s)
