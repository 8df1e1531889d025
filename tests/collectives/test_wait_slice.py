from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from raydist.collectives.process_group import wait_slice


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


def test_slices_until_it_is_completed() -> None:
    work = FakeWork()
    assert not wait_slice(work, 0.0)
    work.done.set()
    assert wait_slice(work, 10.0)


def test_errors_come_out() -> None:
    work = FakeWork("Connection closed by peer")
    work.done.set()
    with pytest.raises(RuntimeError, match="Connection closed"):
        wait_slice(work, 10.0)


def test_a_slice_of_zero_is_not_no_limit() -> None:
    work = FakeWork()
    wait_slice(work, 0.0)
    assert work.limits == [timedelta(milliseconds=1)]
