"""How long a rank watches its bell before it goes to sleep. Only arithmetic."""

from __future__ import annotations

from typing import Self, final

__all__ = ["Patience"]

_WATCH_S = 200e-6
_MOST_SKIPPED = 64
_SHORT_SLEEP_S = 2 * _WATCH_S  # with the time that waking takes: watching would have seen it come


@final
class Patience:
    """Learns whether what is waited for comes soon.

    A rank that sleeps is woken 30 to 200 us late (measured on two cores of a virtual machine), and its peers then wait
    for it in turn. So it watches first, giving its core to whoever wants it. Each time in vain it leaves that out for
    twice as many waits as before: ranks that wait long hardly watch at all.

    Args:
        watches: Whether it ever does.

    Attributes:
        watches: As given.

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
        """Return the patience of one of `num_waiting` processes that wait for each other."""
        return cls(watches=num_waiting > 0)

    def watch_s(self) -> float:
        """How many seconds to watch now."""
        if not self.watches:
            return 0.0
        if self._num_skipped < self._num_to_skip:
            self._num_skipped += 1
            return 0.0
        return _WATCH_S

    def in_time(self) -> None:
        """It came while it was watched for."""
        self._num_skipped = self._num_to_skip = 0

    def in_vain(self) -> None:
        """It did not come while it was watched for."""
        self._num_skipped = 0
        self._num_to_skip = min(max(2 * self._num_to_skip, 1), _MOST_SKIPPED)

    def slept(self, seconds: float) -> None:
        """It came after so long a sleep, without having been watched for."""
        if seconds < _SHORT_SLEEP_S:
            self._num_to_skip //= 2
