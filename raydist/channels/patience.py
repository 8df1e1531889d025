"""The policy for how long a waiting process spins before it sleeps on its futex. Pure arithmetic."""

from __future__ import annotations

from typing import Self, final

__all__ = ["Patience"]

_WATCH_S = 200e-6
_MOST_SKIPPED = 64
_SHORT_SLEEP_S = 2 * _WATCH_S  # includes the wake-up time: spinning would have been enough


@final
class Patience:
    """An adaptive spin-then-sleep policy.

    A sleeping rank is woken 30 to 200 us late (measured on two cores of a virtual machine), and its peers then wait for
    it in turn. A rank therefore spins first, yielding its core. After each spin in vain, the rank skips spinning for
    twice as many waits as before, so that ranks with long waits hardly spin.

    Args:
        watches: False to never spin.

    Attributes:
        watches: The argument.

    >>> patience = Patience()
    >>> patience.watch_s() > 0
    True
    >>> patience.in_vain()
    >>> patience.watch_s()
    0.0
    """

    def __init__(self, *, watches: bool = True) -> None:
        self.watches = watches
        self._num_skipped = 0
        self._num_to_skip = 0

    @classmethod
    def among(cls, num_waiting: int) -> Self:
        """Return the policy of one of `num_waiting` processes that wait for each other; 0 never spins."""
        return cls(watches=num_waiting > 0)

    def watch_s(self) -> float:
        """Return the number of seconds to spin now."""
        if not self.watches:
            return 0.0
        if self._num_skipped < self._num_to_skip:
            self._num_skipped += 1
            return 0.0
        return _WATCH_S

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
