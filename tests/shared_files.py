"""Files of shared memory that processes leave behind. Other tests have some beside this one, for a moment each."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from pathlib import Path


def shared_files() -> set[str]:
    """Those of raydist on this machine, by name."""
    return {path.name for path in Path("/dev/shm").glob("*raydist*")}


def left_behind(before: Collection[str], within_s: float = 10.0) -> set[str]:
    """New ones that are still there after so many seconds, all the time since now, and not in use by other tests."""
    end = time.monotonic() + within_s
    left = shared_files() - set(before)
    while left and time.monotonic() < end:
        time.sleep(0.1)
        left &= shared_files()
    return left - used_by_others(left)


def used_by_others(names: Collection[str]) -> set[str]:
    """Of these, what processes have mapped that this one has not started: ranks that meet take some seconds."""
    if not names:
        return set()
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            maps = (entry / "maps").read_text(errors="replace")
            found |= {name for name in names if f"/dev/shm/{name}" in maps and not _is_descendant(int(entry.name))}
    return found


def _is_descendant(pid: int) -> bool:
    """Return True if this process is the other one, or has started it."""
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False
