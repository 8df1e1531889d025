"""The number of elements that a prefetch keeps ready."""

from __future__ import annotations

from typing import final

__all__ = ["BufferSize"]

_MOST = 1024
_WATCHED = 64  # requests of the consumer between two checks for unused room


@final
class BufferSize:
    """A buffer size that doubles when a bursty consumer empties a buffer that was full.

    A buffer that is never full would not be fuller if it were larger. A buffer that is always more than half full is
    halved.

    Args:
        first: Initial and smallest number of elements.
        tuned: True if the size may change.

    Attributes:
        size: Current number of elements.
    """

    def __init__(self, first: int, *, tuned: bool) -> None:
        self.size = first
        self._first = first
        self._tuned = tuned
        self._was_full = False
        self._asked = 0
        self._least_found = _MOST

    def filled(self) -> None:
        """Note that the buffer holds `size` elements."""
        self._was_full = True

    def asked(self, found: int) -> None:
        """Note that the consumer wants an element while `found` elements are ready."""
        if not self._tuned:
            return
        self._asked += 1
        self._least_found = min(self._least_found, found)
        if found == 0 and self._was_full:
            self.size = max(self.size, min(_MOST, 2 * self.size))
            self._look_anew()
        elif self._asked == _WATCHED:
            if self._least_found > self.size // 2:
                self.size = max(self._first, self.size // 2)
            self._look_anew()

    def _look_anew(self) -> None:
        self._was_full = False
        self._asked, self._least_found = 0, max(_MOST, self.size)
