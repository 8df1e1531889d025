"""Futexes in shared memory on Linux, by libc's `syscall`.

A bell is a 32-bit counter. `ring` adds one, atomically in the kernel, and wakes all sleepers. `sleep` takes the count
that the caller has read, and returns at once if the count has changed, so that no wake-up is lost.
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
# FUTEX_WAKE_OP: add 1, wake all sleepers, and wake again if the old count was 0, when no sleeper is left.
_ADD_ONE = (1 << 28) | (1 << 12)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


def why_unsupported() -> str | None:
    """Return the reason why this machine does not support groups in shared memory; None if it does.

    A rank that sees a new counter must also see all stores before it. x86-64 guarantees this order for plain stores;
    other processors would need memory barriers, which Python lacks.
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
        # A separate `CDLL`, since argument types belong to the object. Foreign calls release the GIL.
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
        """Add one and wake all sleepers."""
        self._futex(_SYS_FUTEX, self._address, _WAKE_OP, _EVERYBODY, None, self._address, _ADD_ONE)

    def yield_core(self) -> None:
        """Yield the core to another thread or process."""
        self._futex(_SYS_SCHED_YIELD, None, 0, 0, None, None, 0)

    def sleep(self, seen: int, seconds: float) -> None:
        """Block until the count differs from `seen`, at most for `seconds`; may return early for no reason."""
        whole = int(max(seconds, 0.0))
        limit = _Timespec(whole, int((max(seconds, 0.0) - whole) * 1e9))
        self._futex(_SYS_FUTEX, self._address, _WAIT, seen, ctypes.addressof(limit), None, 0)
