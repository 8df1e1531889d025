"""The wait of a channel's process for its own futex."""

from __future__ import annotations

import time
from typing import final

from raydist.collectives.shared_memory.control import Bell

__all__ = ["LOOK_S", "SpinPolicy", "Sleeper"]

_SPIN_S = 200e-6
_MOST_SKIPPED = 64
_SHORT_SLEEP_S = 2 * _SPIN_S  # includes the wake-up time: spinning would have been enough


@final
class SpinPolicy:
    """An adaptive spin-then-sleep policy.

    A sleeping rank is woken 30 to 200 us late (measured on two cores of a virtual machine), and its peers then wait for
    it in turn. A rank therefore spins first, yielding its core. After each spin in vain, the rank skips spinning for
    twice as many waits as before, so that ranks with long waits hardly spin.

    >>> policy = SpinPolicy()
    >>> policy.spin_s() > 0
    True
    >>> policy.in_vain()
    >>> policy.spin_s()
    0.0
    """

    def __init__(self) -> None:
        self._num_skipped = 0
        self._num_to_skip = 0

    def spin_s(self) -> float:
        """Return the number of seconds to spin now."""
        if self._num_skipped < self._num_to_skip:
            self._num_skipped += 1
            return 0.0
        return _SPIN_S

    def in_time(self) -> None:
        """Record that the event came during the spin."""
        self._num_skipped = self._num_to_skip = 0

    def in_vain(self) -> None:
        """Record that the event did not come during the spin."""
        self._num_skipped = 0
        self._num_to_skip = min(max(2 * self._num_to_skip, 1), _MOST_SKIPPED)

    def slept(self, seconds: float) -> None:
        """Record that the process slept this long without a spin before."""
        if seconds < _SHORT_SLEEP_S:
            self._num_to_skip //= 2


LOOK_S = 0.25
"""The longest time in seconds before a waiting process checks that the other side is alive."""


@final
class Sleeper:
    """A wait for a futex: spin for a moment if spinning has helped before, then sleep.

    Args:
        bell: The futex of this process.
    """

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._policy = SpinPolicy()

    def count(self) -> int:
        """Return the number of wake-ups so far; read it before checking for messages."""
        return self._bell.count()

    def wait(self, seen: int, seconds: float) -> None:
        """Block until a wake-up after count `seen`, for at most `seconds`; may return early without a reason."""
        spin_s = min(self._policy.spin_s(), seconds)
        if spin_s:
            end = time.perf_counter() + spin_s
            while time.perf_counter() < end:
                if self._bell.count() != seen:
                    self._policy.in_time()
                    return
                self._bell.yield_core()
            self._policy.in_vain()
            self._bell.sleep(seen, min(seconds, LOOK_S))
            return
        began = time.perf_counter()
        self._bell.sleep(seen, min(seconds, LOOK_S))
        self._policy.slept(time.perf_counter() - began)
