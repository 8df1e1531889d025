"""The first page of a server's shared memory: versions, and a reader-writer lock on the values.

Readers share the lock; the server holds it alone. The kernel releases the lock when a process dies. The server sets a
flag before it takes the lock and until it has written: readers then yield, and a flag left by a dead server shows that
an update is incomplete. A reader that had to wait sets a flag, too: the server wakes the reader, and does not write
again before the reader had time to read.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import final

from raydist.collectives.shared_memory.control import Bell, why_unsupported
from raydist.errors import DeadlineExceededError, UnavailableError
from raydist.shared_segment import TOKEN_BYTES, Segment

__all__ = ["HEAD_BYTES", "SlicesHead"]

HEAD_BYTES = 4096
_VERSION, _STEP, _WRITES, _WAITING, _READS = range(5)  # int64s after the token
_BELL_AT = 1024  # apart from the counters: rung when a reader waits and values are free again
_SERVER = 0  # the server holds this slot of the segment while it lives
_LOOK_S = 0.05  # how often a waiting reader checks that the server lives
_YIELDS = 5  # before sleeping: most waits are for a copy that is almost done
_SHORTEST_S, _LONGEST_S = 0.00005, 0.001
_CHANCE_S = 0.0003  # until a woken process runs: 30 to 200 us, measured on two cores


@final
class SlicesHead:
    """One process's view of the first page.

    Args:
        segment: The page; this object closes it.
        server: Number of the server, for messages.
    """

    def __init__(self, segment: Segment, server: int) -> None:
        self._segment = segment
        self._server = server
        self._fields = segment.bytes()[TOKEN_BYTES : TOKEN_BYTES + 40].cast("q")
        self._bell = Bell(segment.address + _BELL_AT) if why_unsupported() is None else None
        self._owed: tuple[float, int] | None = None  # time of the wake-up of readers, and number of reads then
        self._turn = threading.Lock()  # among this process's threads, which are one lock owner for the kernel

    @property
    def version(self) -> int:
        """Number of changes of the values."""
        return self._fields[_VERSION]

    @property
    def step(self) -> int:
        """The synchronous step of the values."""
        return self._fields[_STEP]

    @contextlib.contextmanager
    def writing(self, *, timeout_s: float) -> Iterator[None]:
        """Lock the values for a change by the server: readers see all of the change or nothing, and a new version.

        Raises:
            DeadlineExceededError: A reader held the lock for the time limit; nothing was changed.
        """
        self._make_way()
        self._fields[_WRITES] = 1
        try:
            self._wait(lambda: self._segment.try_lock(shared=False), self._nap, timeout_s)
            try:
                yield
            finally:
                self._fields[_VERSION] += 1
                self._segment.unlock()
        finally:
            self._fields[_WRITES] = 0
            self._wake_readers()

    def note_step(self, step: int) -> None:
        """Record, within `writing`, the synchronous step of the values."""
        self._fields[_STEP] = step

    @contextlib.contextmanager
    def reading(self, *, timeout_s: float) -> Iterator[int]:
        """Lock the values for copying them; yields their version.

        Raises:
            DeadlineExceededError: The values were being changed for the time limit.
            UnavailableError: The server is gone.
        """
        if not self._turn.acquire(timeout=timeout_s):
            raise self._too_long(timeout_s)
        try:
            self._wait(self._try_reading, self._sleep_until_free, timeout_s, watch_server=True)
            try:
                self._fields[_READS] += 1  # concurrent readers may lose an increment: it is no exact count
                yield self.version
            finally:
                self._segment.unlock()
        finally:
            self._turn.release()

    def _try_reading(self) -> bool:
        if self._fields[_WRITES] or not self._segment.try_lock(shared=True):
            return False
        if not self._fields[_WRITES]:
            return True
        self._segment.unlock()  # the server wants the lock, or has died with it
        return False

    def _wake_readers(self) -> None:
        if self._fields[_WAITING]:
            self._fields[_WAITING] = 0
            self._owed = time.monotonic(), self._fields[_READS]
            if self._bell is not None:
                self._bell.ring()

    def _make_way(self) -> None:
        """Wait until woken readers had time to take the lock."""
        if self._owed is not None:
            woken, reads = self._owed
            self._owed = None
            while self._fields[_READS] == reads and time.monotonic() - woken < _CHANCE_S:
                os.sched_yield()

    def _wait(
        self, reached: Callable[[], bool], rest: Callable[[int], None], timeout_s: float, *, watch_server: bool = False
    ) -> None:
        if reached():
            return
        start = time.monotonic()
        look_at, tries = start + _LOOK_S, 0
        while not reached():
            now = time.monotonic()
            if watch_server and now > look_at:
                look_at = now + _LOOK_S
                self._require_server()
            if now - start > timeout_s:
                raise self._too_long(timeout_s)
            tries += 1
            rest(tries)

    def _nap(self, tries: int) -> None:
        if tries <= _YIELDS:
            os.sched_yield()
        else:
            time.sleep(min(_SHORTEST_S * 2 ** min(tries - _YIELDS, 10), _LONGEST_S))

    def _sleep_until_free(self, tries: int) -> None:
        if self._bell is None:
            self._fields[_WAITING] = 1
            self._nap(tries)
            return
        seen = self._bell.count()
        self._fields[_WAITING] = 1
        if self._fields[_WRITES]:
            self._bell.sleep(seen, _LOOK_S / 10)

    def _require_server(self) -> None:
        if not self._segment.holds(_SERVER):
            raise UnavailableError(
                f"Parameter server {self._server} must live for its variables to be read, but its process is gone. "
                "Restore from a checkpoint, with a new strategy."
            )

    def _too_long(self, timeout_s: float) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"Values of parameter server {self._server} must be free to be read or changed within {timeout_s:g} s, but "
            "others used them all that time. Look for a process that is stopped, or raise Timeouts.collective_s."
        )

    def close(self) -> None:
        """Close the page. May be called twice."""
        self._segment.close()
