"""Groups of GPUs."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from raydist.collectives.base import Membership
from raydist.collectives.flights import CudaFlight, Flight
from raydist.collectives.process_group import ProcessGroupCommunicator
from raydist.collectives.process_group_backend import MARGIN_S, ProcessGroupBackend, RawGroup
from raydist.errors import UnavailableError

__all__ = ["NcclBackend"]


@final
class NcclBackend(ProcessGroupBackend):
    """NVLink, InfiniBand or TCP between GPUs."""

    name = "nccl"
    devices = ("cuda",)
    host_runs_ahead = True

    def communicator(self, membership: Membership, device: torch.device, timeout_s: float) -> ProcessGroupCommunicator:
        return ProcessGroupCommunicator(membership, device, timeout_s, self)

    def create(self, store: Store, membership: Membership, timeout_s: float) -> RawGroup:
        if not dist.is_nccl_available():
            raise UnavailableError(
                f"A CUDA group needs a PyTorch built with NCCL, which torch {torch.__version__} here is not. Install a "
                "CUDA build of PyTorch, or use CPU replicas."
            )
        # By default torch's watchdog ends the process when a collective is late; here a late one is an error to handle.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s + MARGIN_S)
        return dist.ProcessGroupNCCL(store, membership.rank, membership.world_size, options)

    def collective(self, work: dist.Work) -> Flight:
        return CudaFlight(work)

    def point_to_point(self, work: dist.Work) -> Flight:
        return CudaFlight(work)

    def kill(self, group: RawGroup) -> None:
        group.abort()
