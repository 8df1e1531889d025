"""What the machine or the container has to spare."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

__all__ = ["free_memory", "num_cores"]

_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_FILES = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory() -> float:
    """Bytes that can be had without swapping; infinity where the system does not tell."""
    if sys.platform != "linux":
        return float("inf")
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return min([int(found[1]) * 1024.0 if found else float("inf"), *_free_in_containers()])


def _free_in_containers() -> list[float]:
    free = []
    for limit, used in _CGROUP_FILES:
        try:
            free.append(float(int((_CGROUP / limit).read_text()) - int((_CGROUP / used).read_text())))
        except (OSError, ValueError):  # another version of cgroups, or "max": no limit
            continue
    return free
