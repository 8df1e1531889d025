"""Memory that a worker's process has freed is kept for its next blocks: the system needs longer to give pages than a
decoder to fill them.

glibc gives large arrays pages of their own, and the end of its heap back, each time. For photographs of 224 x 224
pixels as float32 that was 110 page faults and 0.25 ms of 0.77 ms an image.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

__all__ = ["keep_pages", "kept_bytes"]

_M_TRIM_THRESHOLD = -1  # numbers of glibc's malloc.h
_M_MMAP_THRESHOLD = -3
_M_TOP_PAD = -2
_MOST_ARRAY_BYTES = 32 << 20  # glibc takes no more
_MOST_KEPT_BYTES = 256 << 20
# Threads allocate from heaps of this size, and glibc gives back each that gets empty, whatever the threshold, unless as
# much is to be left at the end. A CNN's step that needed one and a half of them took 10,000 page faults: 62 ms, not 41.
_THREAD_HEAP_BYTES = 64 << 20
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
_TUNABLES = "GLIBC_TUNABLES"


def kept_bytes(limit: int | None, environment: Mapping[str, str]) -> tuple[int, int] | None:
    """The largest array whose memory is kept, and how much is kept in all; None to leave things as they are.

    Args:
        limit: What the process may take. A small part of it is kept: what lies idle counts, too.
        environment: Variables of the process: somebody who sets malloc up knows why.

    >>> kept_bytes(1 << 30, {})
    (33554432, 134217728)
    """
    if any(name in environment for name in _VARIABLES) or "glibc.malloc." in environment.get(_TUNABLES, ""):
        return None
    if limit is None:
        return _MOST_ARRAY_BYTES, _MOST_KEPT_BYTES
    return min(_MOST_ARRAY_BYTES, limit // 32), min(_MOST_KEPT_BYTES, limit // 8)


def keep_pages(limit: int | None) -> bool:
    """Let this process keep memory that it frees, within its `limit`. Whether it does: not without glibc."""
    kept = kept_bytes(limit, os.environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if kept is None or mallopt is None:
        return False
    array_bytes, all_bytes = kept
    settings = {_M_MMAP_THRESHOLD: array_bytes, _M_TRIM_THRESHOLD: all_bytes}
    if limit is None:
        settings[_M_TOP_PAD] = _THREAD_HEAP_BYTES
    return all(mallopt(name, value) for name, value in settings.items())
