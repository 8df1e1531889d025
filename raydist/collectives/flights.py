"""Work under way in a backend, made to look alike: has it landed, and wait a slice of time for it.

A wait is cut into slices so that it can notice an abort and a peer's failure between them. That needs care: a sliced
`wait` on gloo's collectives leaves the work running, on gloo's send and receive it closes the connection (measured with
torch 2.13), and on NCCL `wait` only makes the current stream wait, which is what is wanted there.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Protocol, final

import torch.distributed as dist

from raydist.collectives.translation import is_slice_over

__all__ = ["CudaFlight", "Flight", "GlooFlight", "LandedFlight", "ThreadFlight"]


class Flight(Protocol):
    """One operation under way."""

    def landed(self) -> bool:
        """Whether it is over, well or badly."""

    def wait_slice(self, seconds: float) -> bool:
        """Wait at most so long; False if it is still under way. Raises what the operation raised."""


@final
class LandedFlight:
    """Nothing had to be sent."""

    def landed(self) -> bool:
        return True

    def wait_slice(self, seconds: float) -> bool:
        return True


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
