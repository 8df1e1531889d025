"""Shared memory in pages of 2 MB, where the kernel has such.

What passes through shared memory is copied and added up block by block, and a core that begins a new page of 4 KB waits
for its address: a copy of 64 MB took 140 us a MB through small pages and 90 through huge ones (Linux 6.18, a virtual
machine on Zen 4). `/dev/shm` makes no huge pages by itself on most machines; a range that is there already may ask for
them, whatever the machine's settings are (`MADV_COLLAPSE`, Linux 6.1).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any

__all__ = ["join_pages", "map_aligned"]

_HUGE = 2 << 20
_NO_ACCESS, _READ_AND_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_FIXED = 0x10  # MAP_FIXED
_COLLAPSE = 25  # MADV_COLLAPSE
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_aligned(descriptor: int, size: int) -> Any:
    """All of a file as shared memory that begins at a multiple of 2 MB; unmapped with the last that looks into it.

    Returns:
        A buffer of bytes that can be written to (of ctypes).

    Raises:
        OSError: It cannot be mapped.
    """
    address = _reserve_aligned(size)
    try:
        _map(address, size, _READ_AND_WRITE, mmap.MAP_SHARED | mmap.MAP_POPULATE | _FIXED, descriptor)
    except OSError:
        _libc.munmap(address, size)
        raise
    memory = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False
    return memory


def join_pages(address: int, size: int) -> bool:
    """Make huge pages of what lies there, as far as the kernel has some to give; whether all of it is in such now.

    It is copied for that: 20 MB took 10 ms, and half a second where two cores had work for twenty. May be done while
    others read and write there.
    """
    begin = _up(address, _HUGE)
    length = (address + size) // _HUGE * _HUGE - begin
    return length > 0 and _libc.madvise(begin, length, _COLLAPSE) == 0


def _reserve_aligned(size: int) -> int:
    """Addresses that nobody else gets: where the kernel chooses, they begin at any page."""
    begin = _map(None, size + _HUGE, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    address = _up(begin, _HUGE)
    end = _up(address + size, mmap.PAGESIZE)
    if address > begin:
        _libc.munmap(begin, address - begin)
    _libc.munmap(end, begin + size + _HUGE - end)
    return address


def _map(address: int | None, size: int, protection: int, flags: int, descriptor: int) -> int:
    place = _libc.mmap(address, size, protection, flags, descriptor, 0)
    if place in (None, _FAILED):
        number = ctypes.get_errno()
        raise OSError(number, f"{size:,} bytes cannot be mapped: {os.strerror(number)}")
    return int(place)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
