from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest

from raydist.collectives.generation import CudaFlight, GlooFlight


class FakeWork:
    """torch's Work: `wait(limit)` of an unfinished one raises, `wait()` blocks."""

    def __init__(self, error: str | None = None) -> None:
        self.done = threading.Event()
        self.error = error
        self.limits: list[timedelta | None] = []

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self, limit: timedelta | None = None) -> bool:
        self.limits.append(limit)
        if not self.done.wait(30 if limit is None else limit.total_seconds()):
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise RuntimeError(self.error)
        return True


def test_slices_until_it_lands() -> None:
    work = FakeWork()
    flight = GlooFlight(work)  # type: ignore[arg-type]  # a stand-in
    assert not flight.wait_slice(0.0)
    assert not flight.landed()
    work.done.set()
    assert flight.wait_slice(10.0)
    assert flight.landed()


@pytest.mark.parametrize("kind", [GlooFlight, CudaFlight])
def test_errors_come_out(kind: Any) -> None:
    work = FakeWork("Connection closed by peer")
    flight = kind(work)
    work.done.set()
    with pytest.raises(RuntimeError, match="Connection closed"):
        flight.wait_slice(10.0)


def test_the_host_leaves_the_wait_for_a_gpu_to_its_stream() -> None:
    work = FakeWork()
    work.done.set()  # torch's own wait returns at once, whether the device has got there or not
    assert CudaFlight(work).wait_slice(0.0)  # type: ignore[arg-type]  # a stand-in
    assert work.limits == [None], "with a limit torch blocks the host"


def test_a_slice_of_zero_is_not_no_limit() -> None:
    work = FakeWork()
    GlooFlight(work).wait_slice(0.0)  # type: ignore[arg-type]  # a stand-in
    assert work.limits == [timedelta(milliseconds=1)]
