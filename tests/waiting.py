"""Waits of tests, each with a limit."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["wait_until"]


def wait_until(condition: Callable[[], object], within_s: float = 10.0) -> None:
    """Return once a condition is true; fail if it is not within so many seconds."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, f"it did not happen within {within_s} s"
        time.sleep(0.01)
