"""Find the written pages of a private mapping by asking the kernel, without comparing memory."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct

import numpy as np

__all__ = ["PAGE_BYTES", "written_ranges"]

PAGE_BYTES = mmap.PAGESIZE

# Bits of an entry of /proc/self/pagemap: the page is present, is swapped out, and belongs to the file.
_PRESENT, _SWAPPED, _OF_FILE = 1 << 63, 1 << 62, 1 << 61

# The PAGEMAP_SCAN ioctl: its number, its argument, and the page categories "file" and "present or swapped".
_PAGEMAP_SCAN = 0xC0606610
_SCAN = struct.Struct("@12Q")
_IS_FILE, _IS_THERE = 1 << 2, 1 << 3 | 1 << 4
_REGIONS = 64


def written_ranges(address: int, num_bytes: int) -> list[tuple[int, int]] | None:
    """Return the ranges in which a private mapping of a file has private pages.

    A page becomes private when the process first writes to it.

    Args:
        address: Address of the mapping, page-aligned.
        num_bytes: Length of the mapping.

    Returns:
        (begin, end) in bytes from `address`, ascending and disjoint; None if the kernel does not support this.
    """
    end = address + -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
    try:
        descriptor = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _scanned(descriptor, address, end)
    except OSError:  # a kernel before 6.7
        return _read(descriptor, address, end)
    finally:
        os.close(descriptor)


def _scanned(descriptor: int, begin: int, end: int) -> list[tuple[int, int]]:
    """Let the kernel search for private pages: a fifth of the time of reading the entries of all pages."""
    found: list[tuple[int, int]] = []
    regions = (ctypes.c_uint64 * (3 * _REGIONS))()
    at = begin
    while at < end:
        asked = _SCAN.pack(
            *(_SCAN.size, 0, at, end, 0, ctypes.addressof(regions), _REGIONS, 0),
            *(_IS_FILE, _IS_FILE, _IS_THERE, _IS_THERE),  # not a file's page, and present or swapped
        )
        told = bytearray(asked)
        count = fcntl.ioctl(descriptor, _PAGEMAP_SCAN, told)
        for first in range(0, 3 * count, 3):
            run = regions[first] - begin, regions[first + 1] - begin
            if found and found[-1][1] == run[0]:
                found[-1] = found[-1][0], run[1]
            else:
                found.append(run)
        at = _SCAN.unpack(told)[4]
    return found


def _read(descriptor: int, begin: int, end: int) -> list[tuple[int, int]] | None:
    count = (end - begin) // PAGE_BYTES
    try:
        told = os.pread(descriptor, 8 * count, begin // PAGE_BYTES * 8)
    except OSError:
        return None
    if len(told) < 8 * count:
        return None
    return _runs(np.frombuffer(told, dtype=np.uint64))


def _runs(entries: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> list[tuple[int, int]]:
    there = (entries & np.uint64(_PRESENT | _SWAPPED)) != 0
    own = there & ((entries & np.uint64(_OF_FILE)) == 0)
    if not own.any():
        return []
    edges = np.flatnonzero(np.diff(np.concatenate(([False], own, [False])).astype(np.int8)))
    return [(int(begin) * PAGE_BYTES, int(end) * PAGE_BYTES) for begin, end in edges.reshape(-1, 2)]
