"""What the ranks of a group show each other in their segment: how far each has come, and why the group failed.

A rank writes only its own counters, which only grow. Whoever is the last to reach a count wakes the others; nobody else
does, so that a rank that must wait for three others is woken once.
"""

from __future__ import annotations

import enum
import sys
import time
from typing import final

from raydist.collectives.shared_memory.futex import Bell, Fence
from raydist.collectives.shared_memory.layout import CALL_BYTES, FAILURE_BYTES, NUM_BAYS, NUM_SLOTS, Layout
from raydist.collectives.shared_memory.patience import Patience
from raydist.collectives.shared_memory.segment import Segment

__all__ = ["Board", "Count"]


@final
class Count(enum.IntEnum):
    """What a rank counts."""

    ENTERED = 0
    """Collectives that it has begun: its call stands there, and in its slot what it brings where that is small."""
    REDUCED = 1
    """The number of the latest collective whose slice it has reduced where the tensors lie, plus one."""
    LOADED = 2
    """Windows that it has loaded into its staging memory."""
    SERVED = 3
    """Windows of which it has made its part."""
    FAILED = 4
    """1 once it has written why the group failed."""
    SETTLED = 5
    """Collectives through bays for which it has added up what was left to it."""
    ANNOUNCED = 6
    """The number of the latest collective of which it has written how it went, plus one."""


_ALL = slice(None)
_BELL_WORD = 8  # on a cache line of its own: sleepers read it
_ANY_FAILED_WORD = 9  # the first rank's is everybody's: 1 once a rank has failed, so that one look says that none has


@final
class Board:
    """One rank's view of the counters of all.

    Args:
        segment: Where they lie.
        layout: How.
        rank: Whose counters may be written.

    Attributes:
        layout: As given.
        rank: As given.
        bell: That rank's. Its count is read before looking whether there is something to do, and given to :meth:`sleep`
            if there was not.
        bays: Where each bay of each rank lies.
        totals: Where the total of each bay lies.
    """

    def __init__(self, segment: Segment, layout: Layout, rank: int) -> None:
        self.layout = layout
        self.rank = rank
        self._bytes = segment.bytes()
        self._words = self._bytes.cast("Q")
        self._fence = Fence()
        self._lock = self._fence.lock
        ranks = range(layout.world_size)
        self._others = [other for other in ranks if other != rank]
        self._base = layout.words(rank) // 8
        self._places = [[layout.words(other) // 8 + count for other in ranks] for count in Count]
        self._bells = [Bell(segment.address + layout.words(other) + _BELL_WORD * 8) for other in ranks]
        self.bell = self._bells[rank]
        self._failed = self._places[Count.FAILED]
        self._any_failed = layout.words(0) // 8 + _ANY_FAILED_WORD
        # Worked out once: what every collective needs of the layout.
        self._calls = [layout.call(rank, number) for number in range(NUM_SLOTS)]
        self._verdicts = [layout.call(0, number) for number in range(NUM_SLOTS)]
        self.bays = [[layout.bay(other, number) for number in range(NUM_BAYS)] for other in ranks]
        self.totals = [layout.total(number) for number in range(NUM_BAYS)]
        self._patience = Patience.among(layout.world_size)

    # --- counters -----------------------------------------------------------------------------------------------------

    def reach(self, count: Count, value: int, *, waking: int | None = None) -> None:
        """Raise this rank's counter, and wake the others if all have come as far.

        Args:
            count: Which.
            value: To this.
            waking: Only the first so many ranks wait for it; all, unless given.
        """
        self._words[self._base + count] = value
        with self._lock:  # the fence, without the call
            pass
        if waking != 0 and self.all_reached(count, value):
            self.wake(self._others if waking is None else [rank for rank in range(waking) if rank != self.rank])

    def all_reached(self, count: Count, value: int, among: slice = _ALL) -> bool:
        """Whether all ranks have come as far, or those of a slice of them."""
        words = self._words
        for place in self._places[count][among]:  # noqa: SIM110  # a generator takes three times as long
            if words[place] < value:
                return False
        return True

    def announce(self, value: int) -> None:
        """Raise this rank's count of announcements, and wake the others, who wait for nobody else's."""
        self._words[self._base + Count.ANNOUNCED] = value
        self._fence()
        self.wake_others()

    def count_of(self, rank: int, count: Count) -> int:
        """How far one rank has come."""
        return self._words[self._places[count][rank]]

    def missing(self, count: Count, value: int) -> tuple[int, ...]:
        """Ranks that have not come as far."""
        return tuple(rank for rank, place in enumerate(self._places[count]) if self._words[place] < value)

    # --- other words --------------------------------------------------------------------------------------------------

    def load(self, offset: int) -> int:
        return self._words[offset // 8]

    def store(self, offset: int, value: int) -> None:
        self._words[offset // 8] = value
        self._fence()

    # --- calls --------------------------------------------------------------------------------------------------------

    def write_call(self, number: int, call: bytes, memory: int) -> None:
        """Say what this rank calls as collective `number`.

        Args:
            number: Of the collective.
            call: Of `CALL_BYTES - 8` bytes.
            memory: Which tensor in shared memory it is about, 0 for none.
        """
        start = self._calls[number % NUM_SLOTS]
        self._words[start // 8] = memory
        self._bytes[start + 8 : start + CALL_BYTES] = call

    def all_call(self, number: int, call: bytes, memory: int) -> bool:
        """Whether every rank has written just this: of sixty-four, 30 us with cold caches; one by one it is 70."""
        start, size = self.layout.call(0, number), self.layout.world_size
        said = memory.to_bytes(8, sys.byteorder) + call
        return bytes(self._bytes[start : start + size * CALL_BYTES]) == said * size

    def call_of(self, rank: int, number: int) -> bytes:
        start = self.layout.call(rank, number)
        return bytes(self._bytes[start + 8 : start + CALL_BYTES])

    def calls_of(self, number: int) -> list[bytes]:
        """What each rank calls as collective `number`."""
        return [self.call_of(rank, number) for rank in range(self.layout.world_size)]

    def memory_of(self, rank: int, number: int) -> int:
        return self._words[self.layout.call(rank, number) // 8]

    def verdict_of(self, number: int) -> bytes:
        """What the first rank says of how collective `number` went."""
        start = self._verdicts[number % NUM_SLOTS]
        return bytes(self._bytes[start + 8 : start + CALL_BYTES]).rstrip()

    def write_verdict(self, number: int, verdict: bytes) -> None:
        """Say how collective `number` went, where this rank's call stood: the first rank's affair."""
        start = self._calls[number % NUM_SLOTS]
        self._bytes[start + 8 : start + CALL_BYTES] = verdict.ljust(CALL_BYTES - 8)

    # --- failures -----------------------------------------------------------------------------------------------------

    def post(self, failure: bytes) -> None:
        """Tell everybody why the group failed. Call once."""
        data = failure[: FAILURE_BYTES - 8]
        start = self.layout.failure(self.rank)
        self._words[start // 8] = len(data)
        self._bytes[start + 8 : start + 8 + len(data)] = data
        self._words[self._failed[self.rank]] = 1
        self.store(self._any_failed * 8, 1)
        self.wake(range(self.layout.world_size))

    def any_failed(self) -> bool:
        """Whether a rank has posted something."""
        return bool(self._words[self._any_failed])

    def posted(self) -> bytes | None:
        """What a rank has posted, the first in rank order."""
        words = self._words
        for rank, place in enumerate(self._failed):
            if words[place]:
                start = self.layout.failure(rank)
                return bytes(self._bytes[start + 8 : start + 8 + words[start // 8]])
        return None

    # --- sleeping -----------------------------------------------------------------------------------------------------

    def sleep(self, seen: int, seconds: float) -> None:
        """Return when somebody has rung since, after `seconds`, or for no reason."""
        if not self._patience.watches:
            self.bell.sleep(seen, seconds)
            return
        watch_s = min(self._patience.watch_s(), seconds)
        if watch_s > 0:
            if self._rung_within(seen, watch_s):
                self._patience.in_time()
                return
            self._patience.in_vain()
            self.bell.sleep(seen, seconds)
            return
        began = time.perf_counter()
        self.bell.sleep(seen, seconds)
        self._patience.slept(time.perf_counter() - began)

    def _rung_within(self, seen: int, seconds: float) -> bool:
        end = time.perf_counter() + seconds
        while self.bell.count() == seen:
            if time.perf_counter() >= end:
                return False
            self.bell.yield_core()
        return True

    def ring(self) -> None:
        """Wake this rank itself, from another thread."""
        self.bell.ring()

    def wake_others(self) -> None:
        self.wake(self._others)

    def wake(self, ranks: list[int] | range) -> None:
        for rank in ranks:
            self._bells[rank].ring()
