"""Sleeping on a word of shared memory, and waking who sleeps there: Linux's futex, by way of libc's `syscall`.

A bell is a 32-bit counter. Ringing it adds one, atomically (the kernel does), and wakes all sleepers; a sleeper says
which count it has seen, and does not sleep when the bell has been rung since. So no call is lost.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import final

__all__ = ["Bell", "why_unsupported"]

_SYS_FUTEX, _SYS_SCHED_YIELD = 202, 24  # on x86-64
_WAIT, _WAKE_OP = 0, 5
_EVERYBODY = 2**31 - 1
# FUTEX_WAKE_OP's "add 1, then wake here too if the count before was 0": the second half finds nobody left.
_ADD_ONE = (1 << 28) | (1 << 12)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


@final
class _Limit:
    """A time as the kernel is told it; a bell's sleeps have the same one, time after time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        whole = int(seconds) if seconds > 0.0 else 0
        self._timespec = _Timespec(whole, int((seconds - whole) * 1e9) if seconds > 0.0 else 0)
        self.address = ctypes.addressof(self._timespec)


def why_unsupported() -> str | None:
    """Why this machine's ranks cannot meet in shared memory, or None where they can.

    What one rank writes before it raises a counter, another must see once it sees the counter. x86-64 promises that for
    plain stores; other processors would need barriers that Python cannot give.
    """
    if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "AMD64"):
        return f"it needs Linux on x86-64, and this is {sys.platform} on {platform.machine()}"
    return None


@final
class Bell:
    """A counter at an address of shared memory, which must stay mapped."""

    def __init__(self, address: int) -> None:
        self._address = address
        self._count = ctypes.c_uint32.from_address(address)
        self._limit = _Limit(0.0)
        # Loaded for itself: the argument types belong to this object alone. Foreign calls release the GIL.
        self._futex = ctypes.CDLL(None).syscall
        self._futex.argtypes = [
            ctypes.c_long,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_uint,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_uint,
        ]
        self._futex.restype = ctypes.c_long

    def count(self) -> int:
        """Return the number of rings so far, modulo 2**32."""
        return self._count.value

    def ring(self) -> None:
        """Add one and wake whoever sleeps."""
        self._futex(_SYS_FUTEX, self._address, _WAKE_OP, _EVERYBODY, None, self._address, _ADD_ONE)

    def yield_core(self) -> None:
        """Let another thread or process have the core, if one wants it."""
        self._futex(_SYS_SCHED_YIELD, None, 0, 0, None, None, 0)

    def sleep(self, seen: int, seconds: float) -> None:
        """Return when the bell has been rung since its count was `seen`, after `seconds`, or for no reason."""
        limit = self._limit
        if limit.seconds != seconds:
            limit = self._limit = _Limit(seconds)
        self._futex(_SYS_FUTEX, self._address, _WAIT, seen, limit.address, None, 0)
