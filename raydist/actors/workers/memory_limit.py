"""A limit for the memory of an input worker's process: a function that takes too much gets a MemoryError, and no other
process of the machine suffers.

Linux counts what a process has mapped privately and for writing (RLIMIT_DATA): heap and arrays, neither files that are
read where they lie nor the object store.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from raydist.pipelines.engine.machine import free_memory

__all__ = ["limit_memory"]


def limit_memory(num_bytes: int | None) -> int | None:
    """Let this process take `num_bytes` more than it has; None: what is free on the machine or in the container now.

    Returns the number of bytes; None where the system has no such limit.
    """
    if sys.platform != "linux":
        return None
    import resource

    room = num_bytes if num_bytes is not None else free_memory() or 0
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _field("/proc/self/status", "VmData") + room
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    return room


def _field(path: str, name: str) -> int:
    """A field of a file of /proc, in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(path).read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
