"""The seam between our communicators and the process groups of torch.distributed that carry the data.

They are built directly on a store of our own: nothing here touches torch.distributed's process-wide default group.

A wait is cut into slices so that it can notice an abort and a peer's failure between them. That needs care: a sliced
`wait` on gloo's collectives leaves the work running, on gloo's send and receive it closes the connection (measured with
torch 2.13), and on NCCL `wait` only makes the current stream wait, which is what is wanted there.
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
"""Seconds that a backend's own limit is longer than ours: it only bounds what an aborted operation leaves behind."""


class Flight(Protocol):
    """One operation under way."""

    def landed(self) -> bool:
        """Return True once the operation has completed or failed."""

    def wait_slice(self, seconds: float) -> bool:
        """Wait at most so long; False if it is still under way. Raises what the operation raised."""


@final
class GlooFlight:
    """A collective of gloo."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def landed(self) -> bool:
        return self._work.is_completed()

    def wait_slice(self, seconds: float) -> bool:
        try:
            # A timeout of zero would mean none.
            self._work.wait(timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError as error:
            if is_slice_over(error):
                return False
            raise
        return True


@final
class ThreadFlight:
    """A send or receive of gloo: a thread waits for it in one piece, until gloo's own limit."""

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
    """A collective of NCCL. Waiting for it makes the current stream wait, and never blocks the host."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def landed(self) -> bool:
        """Ask the device; for the watchdog's thread alone."""
        return self._work.is_completed()

    def wait_slice(self, seconds: float) -> bool:
        self._work.wait()  # with a limit it would block the host
        return True


class ProcessGroupBackend(Backend):
    """A kind of process group: how one is made, and how its work is waited for.

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
