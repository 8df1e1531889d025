"""The wait of a channel's process for its own futex."""

from __future__ import annotations

import time
from typing import final

from raydist.channels.patience import Patience
from raydist.collectives.shared_memory.futex import Bell

__all__ = ["LOOK_S", "Sleeper"]

LOOK_S = 0.25
"""The longest time in seconds before a waiting process checks that the other side is alive."""


@final
class Sleeper:
    """A wait for a futex: spin for a moment if spinning has helped before, then sleep.

    Args:
        bell: The futex of this process.
        num_ends: Number of ends of the channel.
    """

    def __init__(self, bell: Bell, num_ends: int = 1) -> None:
        self._bell = bell
        self._patience = Patience.among(num_ends)

    def count(self) -> int:
        """Return the number of wake-ups so far; read it before checking for messages."""
        return self._bell.count()

    def wait(self, seen: int, seconds: float) -> None:
        """Block until a wake-up after count `seen`, for at most `seconds`; may return early without a reason."""
        watch_s = min(self._patience.watch_s(), seconds)
        if watch_s:
            end = time.perf_counter() + watch_s
            while time.perf_counter() < end:
                if self._bell.count() != seen:
                    self._patience.in_time()
                    return
                self._bell.yield_core()
            self._patience.in_vain()
            self._bell.sleep(seen, min(seconds, LOOK_S))
            return
        began = time.perf_counter()
        self._bell.sleep(seen, min(seconds, LOOK_S))
        self._patience.slept(time.perf_counter() - began)
