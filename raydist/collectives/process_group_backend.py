"""Interface between raydist's communicators and the process groups of torch.distributed.

raydist creates process groups on its own rendezvous store, and never uses torch.distributed's default group.

A wait is split into slices, so that the waiting rank can check for an abort or a failure of a peer in between. After a
slice has timed out, a collective of gloo goes on, but a send or receive of gloo has closed the connection (measured
with torch 2.13). On NCCL, `wait` only makes the current stream wait, as intended.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from datetime import timedelta
from typing import Any, ClassVar, Protocol, final

import torch.distributed as dist

from raydist.collectives.base import Backend, Membership
from raydist.collectives.translation import is_slice_over
from raydist.compat.torch_internals import Store

__all__ = [
    "MARGIN_S",
    "CudaFlight",
    "Flight",
    "GlooFlight",
    "ProcessGroupBackend",
    "RawGroup",
    "RawWork",
    "ThreadFlight",
]

RawGroup = Any
"""A c10d backend object (ProcessGroupGloo, ProcessGroupNCCL): torch's stubs leave out its collectives."""

RawWork = Any
"""The object that a collective of a raw group returns."""

MARGIN_S = 1.0
"""Seconds by which the backend's limit exceeds raydist's own: the former only ends operations after an abort."""


class Flight(Protocol):
    """One pending operation of a process group."""

    def landed(self) -> bool:
        """Return True once the operation has completed or failed."""

    def wait_slice(self, seconds: float) -> bool:
        """Block at most so long; return False if the operation is still pending. Raises the operation's error."""


@final
class GlooFlight:
    """A collective of gloo."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def landed(self) -> bool:
        return self._work.is_completed()

    def wait_slice(self, seconds: float) -> bool:
        try:
            # gloo takes a timeout of zero for no timeout.
            self._work.wait(timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError as error:
            if is_slice_over(error):
                return False
            raise
        return True


@final
class ThreadFlight:
    """A send or receive of gloo. A thread waits for it without slices, until gloo's own limit."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work
        self._landed = threading.Event()
        self._error: BaseException | None = None

    def start(self) -> ThreadFlight:
        threading.Thread(target=self._wait, name="raydist-point-to-point", daemon=True).start()
        return self

    def _wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = error
        self._landed.set()

    def landed(self) -> bool:
        return self._landed.is_set()

    def wait_slice(self, seconds: float) -> bool:
        if not self._landed.wait(seconds):
            return False
        if self._error is not None:
            raise self._error
        return True


@final
class CudaFlight:
    """A collective of NCCL. `wait_slice` makes the current stream wait, and never blocks the host."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def landed(self) -> bool:
        """Query the device. Only the watchdog's thread may call this."""
        return self._work.is_completed()

    def wait_slice(self, seconds: float) -> bool:
        self._work.wait()  # a timeout would make it block the host
        return True


class ProcessGroupBackend(Backend):
    """Base class of backends on process groups: creates groups and wraps their work.

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
    def collective(self, work: RawWork) -> Flight:
        """Wrap a collective that was started."""

    @abstractmethod
    def point_to_point(self, work: RawWork) -> Flight:
        """Wrap a send or receive that was started."""

    @abstractmethod
    def kill(self, group: RawGroup) -> None:
        """Abort pending operations, as far as the backend can."""
