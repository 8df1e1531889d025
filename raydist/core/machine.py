"""Cores and memory that the machine or the container has free."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

_CGROUPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory"))  # of versions 2 and 1, as seen inside a container
_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
_FILE_PAGES = re.compile(r"^(?:in)?active_file (\d+)$", re.MULTILINE)
_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB", re.MULTILINE)
_LEAST = 1 << 30  # lower bound of the result: less is free only while other processes are about to release much


def num_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory() -> int | None:
    """Return the bytes available without swapping, on the machine and in the container; None except on Linux."""
    if sys.platform != "linux":
        return None
    found = _AVAILABLE.search(Path("/proc/meminfo").read_text())
    available = int(found[1]) * 1024 if found else _LEAST
    return max(_LEAST, min([available, *free_in_containers(_CGROUPS)]))


def free_in_containers(folders: Iterable[Path]) -> list[int]:
    """Return the bytes that each cgroup folder still allows. Cached file pages count as free."""
    free = []
    for folder in folders:
        for limit, used in _LIMITS:
            try:
                cached = sum(map(int, _FILE_PAGES.findall((folder / "memory.stat").read_text())))
                free.append(int((folder / limit).read_text()) - int((folder / used).read_text()) + cached)
            except (OSError, ValueError):  # another version of cgroups, or "max": no limit
                continue
    return free
