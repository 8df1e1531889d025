"""The memory of a process: a limit for input workers, and settings of malloc.

A function that uses too much memory gets a MemoryError, without harm to other processes. Linux counts private, writable
mappings (RLIMIT_DATA): heap and arrays, neither mapped files nor the object store.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from raydist.core.machine import free_memory

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of glibc's malloc.h
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


def limit_memory(num_bytes: int | None) -> int | None:
    """Limit this process to `num_bytes` more memory than now; None: the free memory of the machine or container.

    Returns the number of bytes; None if the system has no such limit.
    """
    if sys.platform != "linux":
        return None
    import resource

    room = num_bytes if num_bytes is not None else free_memory() or 0
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _field("/proc/self/status", "VmData") + room
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    return room


def keep_freed_memory(limit: int | None = None) -> None:
    """Make glibc keep memory that this process frees, because new pages take longer than a decoder needs to fill them.

    Does nothing without glibc, or if the environment configures malloc. A process with a `limit` keeps a small part of
    it, because idle memory counts, too. Without a limit, threads keep empty heaps of 64 MB: a step of a CNN that needed
    more took 62 ms instead of 41.
    """
    mallopt = _mallopt()
    if mallopt is None:
        return
    room = sys.maxsize if limit is None else limit
    mallopt(_MMAP_THRESHOLD, min(32 << 20, room // 32))
    mallopt(_TRIM_THRESHOLD, min(256 << 20, room // 8))
    if limit is None:
        mallopt(_TOP_PAD, 64 << 20)


def return_freed_memory() -> None:
    """Make glibc return what this process frees, but for 64 MB, for replicas whose model fills the memory.

    FSDP frees the parameters of each unit in turn. glibc kept all of them: 430 MB more for a model of 200 MB. With
    thresholds of 256 KB and 4 MB a step of a transformer of 42 MB got 600 MB of new pages and took 1.6 times as long.
    """
    mallopt = _mallopt()
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 4 << 20)
        mallopt(_TRIM_THRESHOLD, 64 << 20)
        mallopt(_TOP_PAD, 0)


def _mallopt() -> Callable[[int, int], int] | None:
    """Return glibc's function; None without glibc, or if the environment configures malloc."""
    is_set = any(name in os.environ for name in _SETTINGS) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    return None if is_set else getattr(ctypes.CDLL(None), "mallopt", None)


def _field(path: str, name: str) -> int:
    """Return a field of a file of /proc in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(path).read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
