"""Communicators on process groups of torch.distributed: gloo for CPUs and NCCL for GPUs.

raydist creates process groups on its own rendezvous store, and never uses the default group of torch.distributed. A
rank waits for gloo in slices, and checks for an abort or a failure of a peer after each slice. A gloo collective
continues after a slice has timed out (measured with torch 2.13). With NCCL, `wait` blocks only the current stream.
"""

from __future__ import annotations

import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar, final

import torch
import torch.distributed as dist

from raydist.collectives.base import ALL_REDUCE, Backend, Communicator, FinishingWork, Membership, Work
from raydist.collectives.rendezvous import ErrorBroadcast, connect_store, local_address
from raydist.collectives.tensors import (
    Staged,
    check_exchange,
    check_parts,
    check_root,
    stage_bytes,
    stage_comparable,
)
from raydist.collectives.translation import (
    aborted_error,
    closed_error,
    is_slice_over,
    late_error,
    translate_torch_error,
)
from raydist.compat.torch_internals import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    Store,
    gloo_group,
    set_timeout,
)
from raydist.core.errors import DeadlineExceededError, RaydistError, UnavailableError
from raydist.core.values import ReduceOp

RawGroup = Any
"""A c10d backend object (ProcessGroupGloo, ProcessGroupNCCL); Any because torch's stubs lack the collectives."""

RawWork = Any
"""The result of a raw group's collective: torch's Work, or an object with the same `is_completed` and `wait`."""

_SLICE_S = 0.05  # interval at which a waiting rank checks for an abort or a failure of a peer
_WATCH_S = 0.2  # interval of the watchdog
_MARGIN_S = 1.0  # the backend's timeout is this much longer than raydist's, and only ends operations after an abort


def wait_slice(work: RawWork, seconds: float) -> bool:
    """Block for up to `seconds` on a gloo collective; return False if it is still pending. Raise its error."""
    try:
        work.wait(timedelta(seconds=max(seconds, 0.001)))  # gloo treats a timeout of zero as no timeout
    except RuntimeError as error:
        if is_slice_over(error):
            return False
        raise
    return True


class ProcessGroupBackend(Backend):
    """Base class of backends on process groups: creates groups.

    Attributes:
        host_runs_ahead: True if `wait` blocks the device's stream, and not the host.
    """

    host_runs_ahead: ClassVar[bool] = False

    def open(self, membership: Membership, device: torch.device, timeout_s: float) -> Communicator:
        generation = Generation.join(membership, self, timeout_s)
        return ProcessGroupCommunicator(generation, device, host_runs_ahead=self.host_runs_ahead)

    @abstractmethod
    def create(self, store: Store, membership: Membership, timeout_s: float) -> RawGroup:
        """Create the process group. All members must have joined the rendezvous.

        Raises:
            UnavailableError: This PyTorch or this machine does not support the backend.
        """

    @abstractmethod
    def kill(self, group: RawGroup) -> None:
        """Abort pending operations, if the backend supports that."""


@final
class Generation:
    """One incarnation of a process group. After the first failure, every call raises that failure."""

    def __init__(
        self, membership: Membership, backend: ProcessGroupBackend, error_broadcast: ErrorBroadcast, timeout_s: float
    ) -> None:
        self.membership = membership
        self.timeout_s = timeout_s
        self._backend = backend
        self._error_broadcast = error_broadcast
        self._lock = threading.Lock()
        self._group: RawGroup | None = None
        self._pending: list[tuple[RawWork, str]] = []
        self._ended = threading.Event()

    @staticmethod
    def join(membership: Membership, backend: ProcessGroupBackend, timeout_s: float) -> Generation:
        """Join the other members. Block until all have joined; raise an error after `timeout_s` seconds."""
        store = connect_store(membership, timeout_s)
        generation = Generation(membership, backend, ErrorBroadcast(store, membership), timeout_s)
        generation.exchange_on_host(b"", "rendezvous")
        try:
            generation._group = backend.create(store, membership, timeout_s)
        except RuntimeError as error:
            raise generation._fail(translate_torch_error(error, membership, "rendezvous")) from error
        if backend.host_runs_ahead:
            threading.Thread(target=generation._watch, name="raydist-collectives-watchdog", daemon=True).start()
        return generation

    def submit(self, operation: str, call: Callable[[RawGroup], RawWork]) -> RawWork:
        """Start an operation of the process group."""
        self.check(operation)
        group = self._group
        if group is None:
            raise closed_error(self.membership, operation)
        try:
            work = call(group)
        except (RuntimeError, ValueError) as error:
            raise translate_torch_error(error, self.membership, operation) from error
        with self._lock:
            if not self._backend.host_runs_ahead:
                self._pending = [each for each in self._pending if not each[0].is_completed()]
            self._pending.append((work, operation))
        return work

    def wait(self, work: RawWork, operation: str, timeout_s: float | None) -> None:
        """Block until an operation ends. After `timeout_s` the caller may wait again; without, a timeout is fatal."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        if self._backend.host_runs_ahead:  # the watchdog checks limits and failures
            self.check(operation)
            self._wait_slice(work, operation, limit_s)
            return
        while True:
            if not work.is_completed():
                self.check(operation)
            if self._wait_slice(work, operation, min(_SLICE_S, deadline - time.monotonic())):
                return
            if time.monotonic() >= deadline:
                raise self._timeout_error(operation, limit_s, fatal=timeout_s is None)
            self._poll_failure()

    def exchange_on_host(self, data: bytes, what: str) -> list[bytes]:
        """Exchange data through the store; return every rank's data, by rank. Blocks until all ranks have called it."""
        self.check(what)
        try:
            return self._error_broadcast.exchange(data, what, self.timeout_s)
        except DeadlineExceededError as error:
            self._error_broadcast.fail(error)
            raise
        except RuntimeError as error:  # the store is closed
            raise translate_torch_error(error, self.membership, what) from error

    def abort(self) -> None:
        """Fail the group for every member."""
        self._error_broadcast.fail(aborted_error(self.membership))
        if self._group is not None:
            self._backend.kill(self._group)

    def _watch(self) -> None:
        """Detect hanging collectives on a device, because the host does not wait for collectives there."""
        since = time.monotonic()
        while not self._ended.wait(_WATCH_S):
            with self._lock:
                # Only this thread queries the device.
                before = len(self._pending)
                self._pending = [each for each in self._pending if not each[0].is_completed()]
                oldest = self._pending[0][1] if self._pending else None
                if oldest is None or len(self._pending) < before:
                    since = time.monotonic()
            self._poll_failure()
            if not self._error_broadcast.failed and oldest is not None and time.monotonic() - since > self.timeout_s:
                self._timeout_error(oldest, self.timeout_s, fatal=True)
            if self._error_broadcast.failed and self._group is not None:
                self._backend.kill(self._group)  # threads that wait for the device then raise the failure
                return

    def leave(self) -> None:
        """Release sockets and threads. A daemon thread waits for operations that are still pending."""
        self._ended.set()
        holder, self._group = [self._group], None
        if not self._pending or (
            not self._backend.host_runs_ahead and all(each[0].is_completed() for each in self._pending)
        ):
            holder.clear()
            return
        # gloo's destructor waits for its operations, which cannot be stopped.
        threading.Thread(target=holder.clear, name="raydist-release-group", daemon=True).start()

    def _wait_slice(self, work: RawWork, operation: str, seconds: float) -> bool:
        try:
            if self._backend.host_runs_ahead:
                work.wait()  # blocks the current stream; with a timeout it would block the host
                return True
            return wait_slice(work, seconds)
        except RuntimeError as error:
            raise self._fail(translate_torch_error(error, self.membership, operation)) from error

    def check(self, operation: str) -> None:
        """Raise the failure that has ended this generation, if there is one."""
        self._error_broadcast.check(operation)

    def _poll_failure(self) -> None:
        if self._error_broadcast.listen():
            self._error_broadcast.name_missing_ranks()  # the peer waits for each rank's report

    def _fail(self, error: RaydistError) -> RaydistError:
        """Record a failure of this rank, and return it with the missing ranks."""
        self._error_broadcast.fail(error)
        return self._error_broadcast.name_missing_ranks() or error

    def _timeout_error(self, operation: str, limit_s: float, *, fatal: bool) -> RaydistError:
        error = late_error(self.membership, operation, limit_s, fatal=fatal)
        return self._fail(error) if fatal else error


# MEAN is SUM and a division by raydist, so that all backends give the same result.
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
        self.host_runs_ahead = host_runs_ahead
        self._generation = generation

    def copy_to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        read = super().copy_to_host(tensor)
        if not self.host_runs_ahead:
            return read

        def wait() -> torch.Tensor:
            host = read()
            self._generation.check("a copy to the host")  # an abort also ends the copy
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

    def all_to_all_rows(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], lengths: Sequence[Sequence[int]]
    ) -> Work:
        check_exchange(outputs, inputs, lengths, self.rank)
        if not any(map(any, lengths)):  # otherwise all ranks call it, also those without rows
            return FinishingWork(lambda limit_s: None)
        mine = stage_bytes(torch.cat(inputs))
        received = torch.cat(outputs)  # allocates the memory
        staged = stage_bytes(received)
        sizes = [[each.nbytes for each in several] for several in (outputs, inputs)]

        def deliver() -> None:
            staged.deliver()
            for output, part in zip(outputs, received.split([len(each) for each in outputs]), strict=True):
                output.detach().copy_(part)

        operation = "all_to_all_rows"
        work = self._generation.submit(
            operation, lambda group: group.alltoall_base(staged.carrier, mine.carrier, *sizes, AllToAllOptions())
        )
        return FinishingWork(lambda limit_s: self._generation.wait(work, operation, limit_s), deliver)

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
            # All ranks have the same shape, so all skip an empty collective. gloo itself would run it.
            return FinishingWork(lambda limit_s: None, deliver)
        generation = self._generation
        work = generation.submit(operation, call)
        return FinishingWork(lambda limit_s: generation.wait(work, operation, limit_s), deliver)


@final
class GlooBackend(ProcessGroupBackend):
    """The gloo backend: TCP between processes."""

    name = "gloo"
    devices = ("cpu",)

    def create(self, store: Store, membership: Membership, timeout_s: float) -> RawGroup:
        timeout, hostname = timedelta(seconds=timeout_s + _MARGIN_S), local_address(membership)
        return gloo_group(store, membership.rank, membership.world_size, timeout=timeout, hostname=hostname)

    def kill(self, group: RawGroup) -> None:
        """Do nothing: gloo has no abort. Its threads end when a peer closes the connection or the time limit passes."""


@final
class NcclBackend(ProcessGroupBackend):
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
        set_timeout(options, timedelta(seconds=timeout_s + _MARGIN_S))
        return dist.ProcessGroupNCCL(store, membership.rank, membership.world_size, options)

    def kill(self, group: RawGroup) -> None:
        group.abort()
