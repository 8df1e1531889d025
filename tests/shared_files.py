"""Files of shared memory that processes leave behind. Other tests have some beside this one, for a moment each."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path


def shared_files() -> set[str]:
    """Those of raydist on this machine, by name."""
    return {path.name for path in Path("/dev/shm").glob("*raydist*")}


def left_behind(before: Collection[str], within_s: float = 10.0) -> set[str]:
    """New ones that are still there after so many seconds, all the time since now."""
    end = time.monotonic() + within_s
    left = shared_files() - set(before)
    while left and time.monotonic() < end:
        time.sleep(0.1)
        left &= shared_files()
    return left
