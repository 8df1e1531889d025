"""Waiting for one result of an actor, with a limit, and able to stop when nobody wants it any more."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray

from raydist.errors import CancelledError

__all__ = ["wait_for"]

_SLICE_S = 0.2  # how long a wait goes on after it was cancelled


def wait_for(ref: Any, limit_s: float, cancelled: Callable[[], bool]) -> bool:
    """Whether `ref` is there (a result or an error) within `limit_s` seconds. Fetches nothing.

    Raises:
        CancelledError: `cancelled()` became true before.
    """
    end = time.monotonic() + limit_s
    while True:
        if cancelled():
            raise CancelledError("This pool of input workers was closed while it worked.")
        left = end - time.monotonic()
        if ray.wait([ref], timeout=max(0.0, min(_SLICE_S, left)), fetch_local=False)[0]:
            return True
        if left <= 0:
            return False
