"""How a process of a channel waits for its own bell."""

from __future__ import annotations

import time
from typing import final

from raydist.channels.patience import Patience
from raydist.collectives.shared_memory.futex import Bell

__all__ = ["LOOK_S", "Sleeper"]

LOOK_S = 0.25
"""How long the death of the other side may go unnoticed by one that waits."""


@final
class Sleeper:
    """Waits for its own bell: watches it for a moment where that has paid, then sleeps.

    Args:
        bell: That bell.
        num_ends: Ends of its channel: in a crowd nobody watches.
    """

    def __init__(self, bell: Bell, num_ends: int = 1) -> None:
        self._bell = bell
        self._patience = Patience.among(num_ends)

    def count(self) -> int:
        """Of rings so far: take it before looking for what is waited for."""
        return self._bell.count()

    def wait(self, seen: int, seconds: float) -> None:
        """Return once the bell was rung since `seen`, after `seconds`, or for no reason."""
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
