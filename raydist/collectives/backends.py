"""The process groups of torch.distributed that carry the data: gloo for the CPU, NCCL for CUDA.

They are built directly on a store of our own: nothing here touches torch.distributed's process-wide default group.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from raydist.collectives.base import Membership
from raydist.collectives.flights import CudaFlight, Flight, GlooFlight, ThreadFlight
from raydist.collectives.rendezvous import local_address
from raydist.errors import InvalidArgumentError, UnavailableError

__all__ = ["Backend", "RawGroup", "backend_for"]

RawGroup = Any
"""A c10d backend object (ProcessGroupGloo, ProcessGroupNCCL): torch's stubs leave out its collectives."""

# A backend's own limit only bounds what an aborted operation leaves behind; it may not end before ours.
_MARGIN_S = 1.0


class Backend(ABC):
    """How one kind of device makes a process group and waits for its work."""

    @abstractmethod
    def create(self, store: Store, membership: Membership, timeout_s: float) -> RawGroup:
        """Connect to the other members, which are known to have arrived."""

    @abstractmethod
    def collective(self, work: dist.Work) -> Flight:
        """A collective that was started."""

    @abstractmethod
    def point_to_point(self, work: dist.Work) -> Flight:
        """A send or receive that was started."""

    @abstractmethod
    def kill(self, group: RawGroup) -> None:
        """Stop what is under way, as far as the backend can."""


@final
class GlooBackend(Backend):
    """TCP between processes."""

    def create(self, store: Store, membership: Membership, timeout_s: float) -> RawGroup:
        gloo: Any = ProcessGroupGloo  # torch's stubs do not know its `_Options`
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s + _MARGIN_S)
        options._devices = [gloo.create_device(hostname=local_address(membership), lazy_init=False)]
        return gloo(store, membership.rank, membership.world_size, options)

    def collective(self, work: dist.Work) -> Flight:
        return GlooFlight(work)

    def point_to_point(self, work: dist.Work) -> Flight:
        return ThreadFlight(work).start()

    def kill(self, group: RawGroup) -> None:
        """Nothing: gloo cannot be stopped; its threads end when a peer closes or its limit is over."""


@final
class NcclBackend(Backend):
    """NVLink, InfiniBand or TCP between GPUs."""

    def create(self, store: Store, membership: Membership, timeout_s: float) -> RawGroup:
        if not dist.is_nccl_available():
            raise UnavailableError("A CUDA group needs a PyTorch built with NCCL, which this one is not.")
        # By default torch's watchdog ends the process when a collective is late; here a late one is an error to handle.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s + _MARGIN_S)
        return dist.ProcessGroupNCCL(store, membership.rank, membership.world_size, options)

    def collective(self, work: dist.Work) -> Flight:
        return CudaFlight(work)

    def point_to_point(self, work: dist.Work) -> Flight:
        return CudaFlight(work)

    def kill(self, group: RawGroup) -> None:
        group.abort()


_BACKENDS: dict[str, type[Backend]] = {"cpu": GlooBackend, "cuda": NcclBackend}


def backend_for(device: torch.device) -> Backend:
    """The backend of a device; InvalidArgumentError for a device that none serves."""
    if device.type not in _BACKENDS:
        raise InvalidArgumentError(f"A group must be on one of {', '.join(_BACKENDS)}, got device {device}.")
    return _BACKENDS[device.type]()
