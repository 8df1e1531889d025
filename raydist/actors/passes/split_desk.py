"""Deals the splits of one pass to those that ask."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, final

from raydist.actors.passes.dealt_splits import DealtSplit, DealtSplits, Reader
from raydist.actors.passes.served_pass import Poll

if TYPE_CHECKING:
    from raydist.actors.passes.served_pass import ServedPass

__all__ = ["SplitDesk"]

_WAIT_S = 0.25  # for the pass: nobody else is dealt anything meanwhile


@final
class SplitDesk:
    """Of one pass, which nobody else reads. Any thread may ask.

    Args:
        served: The pass; for it there is one reader.
    """

    def __init__(self, served: ServedPass) -> None:
        self._served = served
        self._splits = DealtSplits()
        self._lock = threading.Lock()

    def claim(self, reader: Reader, used: int) -> DealtSplit | None:
        """The next split for a reader; None where there is none yet. The end, and an error, is given to everyone.

        Args:
            reader: Who asks.
            used: How many batches it has used for good.
        """
        with self._lock:
            self._splits.confirm(reader, used)
            again = self._splits.again(reader)
            if again is not None:
                return again
            place = self._splits.next_place
            entries = self._served.poll(Poll(0, start=place, done=place, wait_s=_WAIT_S))
            if not entries:
                return None
            return DealtSplit(entries[0]) if entries[0].last else self._splits.give(reader, entries[0])

    def lost(self, reader: Reader, used: int) -> None:
        """A reader is gone; see `DealtSplits.lost`."""
        with self._lock:
            self._splits.lost(reader, used)
