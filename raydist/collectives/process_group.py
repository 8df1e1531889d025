"""Communicators on process groups of torch.distributed: gloo for CPUs and NCCL for GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist

from raydist.collectives.base import ALL_REDUCE, Communicator, FinishingWork, Membership, Work
from raydist.collectives.generation import MARGIN_S, Generation, ProcessGroupBackend, RawGroup
from raydist.collectives.rendezvous import local_address
from raydist.collectives.tensors import Staged, check_parts, check_root, stage_bytes, stage_comparable
from raydist.compat.torch_internals import (
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
    Store,
    gloo_group,
    set_timeout,
)
from raydist.errors import UnavailableError
from raydist.host_copy import begin_host_copy
from raydist.values import ReduceOp

__all__ = ["GlooBackend", "NcclBackend", "ProcessGroupCommunicator"]

# MEAN is a SUM with a later division, so that all backends compute the same.
_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MEAN: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}


@final
class ProcessGroupCommunicator(Communicator):
    """A communicator on a process group of torch.distributed. Not thread-safe, except for `abort`."""

    def __init__(self, generation: Generation, device: torch.device, *, host_runs_ahead: bool) -> None:
        self.membership = generation.membership
        self.timeout_s = generation.timeout_s
        self.device = device
        self._host_runs_ahead = host_runs_ahead
        self._generation = generation

    @property
    def host_runs_ahead(self) -> bool:
        return self._host_runs_ahead

    def copy_to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        if not self.host_runs_ahead:
            return super().copy_to_host(tensor)
        read = begin_host_copy(tensor)

        def wait() -> torch.Tensor:
            host = read()
            self._generation.check("a copy to the host")  # the copy also ends after an abort
            return host

        return wait

    def exchange_on_host(self, data: bytes, what: str) -> list[bytes]:
        return self._generation.exchange_on_host(data, what)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Work:
        staged = stage_comparable(tensor, op, self.world_size)
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp(_OPS[op])
        return self._launch(ALL_REDUCE[op], [staged], lambda group: group.allreduce([staged.carrier], options))

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        check_parts("all_gather", outputs, tensor, self.world_size)
        mine = stage_bytes(tensor)
        staged = [stage_bytes(output) for output in outputs]
        carriers = [output.carrier for output in staged]
        return self._launch(
            "all_gather", staged, lambda group: group.allgather([carriers], [mine.carrier], AllgatherOptions())
        )

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        check_root(root, self.membership.group, self.world_size)
        staged = stage_bytes(tensor)
        options = BroadcastOptions()
        options.rootRank = root
        return self._launch(
            f"broadcast(root={root})", [staged], lambda group: group.broadcast([staged.carrier], options)
        )

    def abort(self) -> None:
        self._generation.abort()

    def close(self) -> None:
        self._generation.leave()

    def _launch(self, operation: str, staged: list[Staged], call: Callable[[RawGroup], dist.Work]) -> Work:
        def deliver() -> None:
            for tensor in staged:
                tensor.deliver()

        if not any(tensor.carrier.numel() for tensor in staged):
            # All ranks have the same shape, so all of them skip an empty collective, which gloo does not.
            return FinishingWork(lambda limit_s: None, deliver)
        generation = self._generation
        work = generation.submit(operation, call)
        return FinishingWork(lambda limit_s: generation.wait(work, operation, limit_s), deliver)


class _TorchBackend(ProcessGroupBackend):
    def open(self, membership: Membership, device: torch.device, timeout_s: float) -> ProcessGroupCommunicator:
        generation = Generation.join(membership, self, timeout_s)
        return ProcessGroupCommunicator(generation, device, host_runs_ahead=self.host_runs_ahead)


@final
class GlooBackend(_TorchBackend):
    """The gloo backend: TCP between processes."""

    name = "gloo"
    devices = ("cpu",)

    def create(self, store: Store, membership: Membership, timeout_s: float) -> RawGroup:
        timeout, hostname = timedelta(seconds=timeout_s + MARGIN_S), local_address(membership)
        return gloo_group(store, membership.rank, membership.world_size, timeout=timeout, hostname=hostname)

    def kill(self, group: RawGroup) -> None:
        """Do nothing: gloo has no abort. Its threads end when a peer closes the connection or the time limit passes."""


@final
class NcclBackend(_TorchBackend):
    """The NCCL backend: NVLink, InfiniBand or TCP between GPUs."""

    name = "nccl"
    devices = ("cuda",)
    host_runs_ahead = True

    def create(self, store: Store, membership: Membership, timeout_s: float) -> RawGroup:
        if not dist.is_nccl_available():
            raise UnavailableError(
                f"A CUDA group needs a PyTorch built with NCCL, which torch {torch.__version__} here is not. Install a "
                "CUDA build of PyTorch, or use CPU replicas."
            )
        # By default torch's watchdog ends the process after a time-out; here a time-out raises an error.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        options = dist.ProcessGroupNCCL.Options()
        set_timeout(options, timedelta(seconds=timeout_s + MARGIN_S))
        return dist.ProcessGroupNCCL(store, membership.rank, membership.world_size, options)

    def kill(self, group: RawGroup) -> None:
        group.abort()
