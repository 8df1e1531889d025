"""A limit for the memory of an input worker's process: a function that takes too much gets a MemoryError, and no other
process of the machine suffers.

Linux counts what a process has mapped privately and for writing (RLIMIT_DATA): heap and arrays, neither files that are
read where they lie nor the object store.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

__all__ = ["free_in_containers", "limit_memory"]

_CGROUPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory"))  # of versions 2 and 1, as a container sees them
_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
_FILE_PAGES = re.compile(r"^(?:in)?active_file (\d+)$", re.MULTILINE)
_LEAST = 1 << 30  # of what counts as free: less is found only when others are about to give much back


def limit_memory(num_bytes: int | None) -> int | None:
    """Let this process take `num_bytes` more than it has; None: what is free on the machine or in the container now.

    Returns the number of bytes; None where the system has no such limit.
    """
    if sys.platform != "linux":
        return None
    import resource

    room = _free_memory() if num_bytes is None else num_bytes
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _field("/proc/self/status", "VmData") + room
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    return room


def _field(path: str, name: str) -> int:
    """A field of a file of /proc, in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(path).read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _free_memory() -> int:
    return max(_LEAST, min([_field("/proc/meminfo", "MemAvailable"), *free_in_containers(_CGROUPS)]))


def free_in_containers(folders: Iterable[Path]) -> list[int]:
    """What the container in each cgroup folder may still take; what it holds of files can be given back."""
    free = []
    for folder in folders:
        for limit, used in _LIMITS:
            try:
                cached = sum(map(int, _FILE_PAGES.findall((folder / "memory.stat").read_text())))
                free.append(int((folder / limit).read_text()) - int((folder / used).read_text()) + cached)
            except (OSError, ValueError):  # another version of cgroups, or "max": no limit
                continue
    return free
