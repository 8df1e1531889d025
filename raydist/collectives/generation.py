"""One generation of a process group of torch.distributed, from the rendezvous of the members until the first failure.

raydist creates process groups on its own rendezvous store, and never uses torch.distributed's default group. A wait is
split into slices, so that the waiting rank can check for an abort or a failure of a peer in between; after a slice has
timed out, a collective of gloo goes on (measured with torch 2.13). On NCCL, `wait` only makes the current stream wait.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, final

from raydist.collectives.base import Backend, Membership
from raydist.collectives.rendezvous import Bulletin, connect_store
from raydist.collectives.translation import describe_operation, is_slice_over, translate_torch_error
from raydist.compat.torch_internals import Store
from raydist.errors import CancelledError, DeadlineExceededError, FailedPreconditionError, RaydistError

__all__ = ["MARGIN_S", "Generation", "ProcessGroupBackend", "RawGroup", "RawWork", "wait_slice"]

RawGroup = Any
"""A c10d backend object (ProcessGroupGloo, ProcessGroupNCCL): torch's stubs leave out its collectives."""

RawWork = Any
"""The object that a collective of a raw group returns: torch's Work, or one with its `is_completed` and `wait`."""

MARGIN_S = 1.0
"""Seconds by which the backend's limit exceeds raydist's own: the former only ends operations after an abort."""

_SLICE_S = 0.05  # interval at which a waiting rank checks for an abort or a failure of a peer
_WATCH_S = 0.2


def wait_slice(work: RawWork, seconds: float) -> bool:
    """Block at most so long for a collective of gloo; return False if it is still pending. Raises its error."""
    try:
        work.wait(timedelta(seconds=max(seconds, 0.001)))  # gloo takes a timeout of zero for no timeout
    except RuntimeError as error:
        if is_slice_over(error):
            return False
        raise
    return True


class ProcessGroupBackend(Backend):
    """Base class of backends on process groups: creates groups.

    Attributes:
        host_runs_ahead: True if a wait makes the device's stream wait, and not the host.
    """

    host_runs_ahead: ClassVar[bool] = False

    @abstractmethod
    def create(self, store: Store, membership: Membership, timeout_s: float) -> RawGroup:
        """Create the process group. All members must have arrived.

        Raises:
            UnavailableError: This PyTorch or this machine does not support the backend.
        """

    @abstractmethod
    def kill(self, group: RawGroup) -> None:
        """Abort pending operations, as far as the backend can."""


@final
class Generation:
    """The process group of one generation. After the first failure every call raises that failure."""

    def __init__(
        self, membership: Membership, backend: ProcessGroupBackend, bulletin: Bulletin, timeout_s: float
    ) -> None:
        self.membership = membership
        self.timeout_s = timeout_s
        self._backend = backend
        self._bulletin = bulletin
        self._lock = threading.Lock()
        self._group: RawGroup | None = None
        self._pending: list[tuple[RawWork, str]] = []
        self._ended = threading.Event()

    @staticmethod
    def join(membership: Membership, backend: ProcessGroupBackend, timeout_s: float) -> Generation:
        """Join the other members. Blocks; raises after `timeout_s` if one is missing."""
        operation = "rendezvous"
        store = connect_store(membership, timeout_s)
        generation = Generation(membership, backend, Bulletin(store, membership), timeout_s)
        generation.exchange_on_host(b"", operation)
        try:
            generation._group = backend.create(store, membership, timeout_s)
        except RuntimeError as error:
            raise generation._fail(translate_torch_error(error, membership, operation)) from error
        if backend.host_runs_ahead:
            threading.Thread(target=generation._watch, name="raydist-collectives-watchdog", daemon=True).start()
        return generation

    def submit(self, operation: str, call: Callable[[RawGroup], RawWork]) -> RawWork:
        """Start an operation of the process group."""
        self.check(operation)
        group = self._group
        if group is None:
            raise FailedPreconditionError(
                f"{describe_operation(self.membership, operation)}: the group is closed. Open a new one."
            )
        try:
            work = call(group)
        except (RuntimeError, ValueError) as error:
            raise translate_torch_error(error, self.membership, operation) from error
        with self._lock:
            if not self._backend.host_runs_ahead:
                self._drop_completed()
            self._pending.append((work, operation))
        return work

    def _drop_completed(self) -> None:
        self._pending = [each for each in self._pending if not each[0].is_completed()]

    def wait(self, work: RawWork, operation: str, timeout_s: float | None) -> None:
        """Block until an operation ends. The group's own limit fails the group; after another limit, wait again."""
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
                raise self._late(operation, limit_s, fatal=timeout_s is None)
            self._listen()

    def exchange_on_host(self, data: bytes, what: str) -> list[bytes]:
        """Exchange data through the store; return every rank's data, by rank. Blocks until all ranks have called it."""
        self.check(what)

        def check() -> None:
            self._listen()
            self.check(what)

        try:
            return self._bulletin.exchange(data, what, self.timeout_s, check)
        except DeadlineExceededError as error:
            self._bulletin.fail(error)
            raise
        except RuntimeError as error:  # the store is closed
            raise translate_torch_error(error, self.membership, what) from error

    def abort(self) -> None:
        """Fail the group for every member."""
        rank, group = self.membership.rank, self.membership.group
        self._bulletin.fail(
            CancelledError(f"rank {rank} aborted group {group!r}, generation {self.membership.generation}.")
        )
        if self._group is not None:
            self._backend.kill(self._group)

    def _watch(self) -> None:
        """Run the watchdog, which detects hanging collectives on a device, since the host does not wait for them."""
        since = time.monotonic()
        while not self._ended.wait(_WATCH_S):
            with self._lock:
                # Only this thread queries the device.
                before, self._pending = (
                    len(self._pending),
                    [each for each in self._pending if not each[0].is_completed()],
                )
                oldest = self._pending[0][1] if self._pending else None
                if oldest is None or len(self._pending) < before:
                    since = time.monotonic()
            self._listen()
            if not self._bulletin.failed and oldest is not None and time.monotonic() - since > self.timeout_s:
                self._late(oldest, self.timeout_s, fatal=True)
            if self._bulletin.failed and self._group is not None:
                self._backend.kill(self._group)  # threads that wait for the device wake up and find the failure
                return

    def leave(self) -> None:
        """Release sockets and threads. A daemon thread waits for operations that still hang."""
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
                work.wait()  # makes the current stream wait; a limit would make it block the host
                return True
            return wait_slice(work, seconds)
        except RuntimeError as error:
            raise self._fail(translate_torch_error(error, self.membership, operation)) from error

    def check(self, operation: str) -> None:
        """Raise the failure that has ended this generation, if there is one."""
        self._bulletin.check(operation)

    def _listen(self) -> None:
        if self._bulletin.listen():
            self._bulletin.named()  # the peer posted its failure before its roll call

    def _fail(self, error: RaydistError) -> RaydistError:
        """Record a failure of this rank, and return it with the missing ranks."""
        self._bulletin.fail(error)
        return self._bulletin.named() or error

    def _late(self, operation: str, limit_s: float, *, fatal: bool) -> RaydistError:
        message = f"{describe_operation(self.membership, operation)} timed out after {limit_s} s."
        if not fatal:
            return DeadlineExceededError(f"{message} It goes on; wait again, or allow more time.")
        advice = "Raise the limit (Timeouts.collective_s) if the others were only slow."
        return self._fail(DeadlineExceededError(f"{message} {advice}"))
