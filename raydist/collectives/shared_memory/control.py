"""The control block of a shared segment: counters and descriptions of calls of the ranks, and futexes to wait for them.

Every rank writes only its own counters, which only grow. The last rank to reach a value wakes the others, so that a
rank that waits for three others wakes up once.

A futex is a 32-bit counter. `ring` adds one, atomically in the kernel, and wakes all sleepers. `sleep` takes the count
that the caller has read, and returns at once if the count has changed, so that no wake-up is lost.
"""

from __future__ import annotations

import ctypes
import enum
import platform
import sys
import threading
import time
from typing import final

from raydist.core.machine import num_cores
from raydist.utils.shared_segment import Segment

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
class Futex:
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


NUM_SLOTS = 16
"""Number of collectives whose calls and small tensors the segment holds at once."""
NUM_BUFFERS = 4
"""Number of staging buffers of each rank; the module `transfers` explains why four."""
CALL_BYTES = 256
"""Size of the description of a call: the number of a shared tensor, and text."""

_PAGE = 4096
_LINE = 64
_RANK_BYTES = 2 * _LINE  # counters on one cache line, the futex on another
_FUTEX_BYTE = _LINE
_ANY_FAILED_WORD = 9  # of rank 0: one load shows that no rank has failed
_MOST_STAGING = 16 << 20
_MOST_CHUNK = 256 << 10
_FEW_RANKS = 4
_SPIN_S = 100e-6  # the kernel wakes a sleeper 30 to 200 us late; two ranks per core may spin without harm


@final
class Count(enum.IntEnum):
    """The counters of a rank."""

    ENTERED = 0
    """Number of collectives that the rank has begun; their descriptions and small tensors are complete."""
    REDUCED = 1
    """Number of the latest collective whose slice the rank has reduced in shared tensors, plus one."""
    LOADED = 2
    """Number of windows that the rank has written into its staging buffers."""
    SERVED = 3
    """Number of windows of which the rank has reduced its slice."""


@final
class Layout:
    """Offsets in a segment: a page with the token, counters, calls, small tensors, staging buffers.

    >>> [Layout(world_size).size >> 20 for world_size in (1, 2, 4, 8, 64)]
    [2, 6, 20, 18, 80]
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        # size of a slot. Each rank copies smaller tensors into a slot, and reduces the slots of all ranks.
        self.slot_bytes = (64 << 10) if world_size <= _FEW_RANKS else (16 << 10)
        most = _MOST_STAGING // (NUM_BUFFERS * world_size**2) // _PAGE * _PAGE
        # size of one rank's slice in a staging buffer; a buffer has a chunk for every rank
        self.chunk_bytes = max(_PAGE, min(_MOST_CHUNK, most))
        self._calls = _PAGE + _pages(world_size * _RANK_BYTES)
        self._slots = self._calls + _pages(world_size * NUM_SLOTS * CALL_BYTES)
        self._staging = self._slots + world_size * NUM_SLOTS * self.slot_bytes
        self.size = self._staging + NUM_BUFFERS * world_size**2 * self.chunk_bytes  # size of the segment in bytes

    def call(self, rank: int, number: int) -> int:
        """Return the offset of a rank's description of a collective. The descriptions of all ranks are contiguous."""
        return self._calls + (number % NUM_SLOTS * self.world_size + rank) * CALL_BYTES

    def slot(self, rank: int, number: int) -> int:
        """Return the offset of a rank's small tensor in collective `number`."""
        return self._slots + (rank * NUM_SLOTS + number % NUM_SLOTS) * self.slot_bytes

    def chunk(self, rank: int, window: int, place: int) -> int:
        """Return the offset of chunk `place` in the staging buffer of `rank` for a window."""
        return (
            self._staging + ((rank * NUM_BUFFERS + window % NUM_BUFFERS) * self.world_size + place) * self.chunk_bytes
        )


@final
class ControlBlock:
    """One rank's view of the counters and calls of all ranks.

    Args:
        rank: The rank whose counters this object writes.
    """

    def __init__(self, segment: Segment, layout: Layout, rank: int) -> None:
        self.layout = layout
        self.rank = rank
        self._bytes = segment.bytes()
        self._words = self._bytes.cast("Q")
        self._lock = threading.Lock()
        ranks = range(layout.world_size)
        self._others = [other for other in ranks if other != rank]
        lines = [_PAGE + other * _RANK_BYTES for other in ranks]
        self._places = [[line // 8 + count for line in lines] for count in Count]
        self._any_failed = lines[0] // 8 + _ANY_FAILED_WORD
        self._futexes = [Futex(segment.address + line + _FUTEX_BYTE) for line in lines]
        self.futex = self._futexes[rank]
        self._spins = layout.world_size <= 2 * num_cores()

    # --- counters -----------------------------------------------------------------------------------------------------

    def reach(self, count: Count, value: int) -> None:
        """Set this rank's counter, and wake the other ranks if all counters have reached the value."""
        self._words[self._places[count][self.rank]] = value
        self._fence()
        if self.all_reached(count, value):
            self.wake_others()

    def all_reached(self, count: Count, value: int) -> bool:
        """Return True if the counters of all ranks are at least `value`."""
        words = self._words
        for place in self._places[count]:  # noqa: SIM110  # a generator takes three times as long
            if words[place] < value:
                return False
        return True

    def count_of(self, rank: int, count: Count) -> int:
        return self._words[self._places[count][rank]]

    def missing(self, count: Count, value: int) -> list[int]:
        return [rank for rank, place in enumerate(self._places[count]) if self._words[place] < value]

    def _fence(self) -> None:
        """Run a memory fence: the other ranks see all earlier stores before this rank runs later loads.

        x86-64 may reorder a load before an earlier store to another address. A locked instruction prevents it, and
        acquiring an uncontended lock runs one.
        """
        with self._lock:
            pass

    # --- calls --------------------------------------------------------------------------------------------------------

    def write_call(self, number: int, text: bytes, shared: int) -> None:
        """Write this rank's description of collective `number`: a shared tensor and `CALL_BYTES - 8` bytes of text."""
        start = self.layout.call(self.rank, number)
        self._words[start // 8] = shared
        self._bytes[start + 8 : start + CALL_BYTES] = text

    def all_call(self, number: int, text: bytes, shared: int) -> bool:
        """Return True if every rank has written the same description of collective `number`."""
        start, size = self.layout.call(0, number), self.layout.world_size
        said = shared.to_bytes(8, sys.byteorder) + text
        return bytes(self._bytes[start : start + size * CALL_BYTES]) == said * size

    def calls_of(self, number: int) -> list[bytes]:
        """Return every rank's text for collective `number`."""
        starts = [self.layout.call(rank, number) for rank in range(self.layout.world_size)]
        return [bytes(self._bytes[start + 8 : start + CALL_BYTES]) for start in starts]

    def all_share(self, number: int, shared: int) -> bool:
        """Return True if collective `number` has shared tensor `shared` on every rank."""
        ranks = range(self.layout.world_size)
        return all(self._words[self.layout.call(rank, number) // 8] == shared for rank in ranks)

    # --- failures -----------------------------------------------------------------------------------------------------

    def set_failed(self) -> None:
        """Show all ranks that the group has failed, and wake them."""
        self._words[self._any_failed] = 1
        self._fence()
        for futex in self._futexes:
            futex.ring()

    def any_failed(self) -> bool:
        """Return True if a rank has called `set_failed`."""
        return bool(self._words[self._any_failed])

    # --- waiting ------------------------------------------------------------------------------------------------------

    def sleep(self, seen: int, seconds: float) -> None:
        """Spin, then sleep, until the futex's count differs from `seen`, at most for `seconds`."""
        futex = self.futex
        if self._spins:
            end = time.perf_counter() + min(_SPIN_S, seconds)
            while futex.count() == seen:
                if time.perf_counter() >= end:
                    break
                futex.yield_core()
            else:
                return
        futex.sleep(seen, seconds)

    def wake_others(self) -> None:
        for rank in self._others:
            self._futexes[rank].ring()


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE
