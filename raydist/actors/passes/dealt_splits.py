"""Splits of a pass that are dealt first come, first served: each goes to one reader, once."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, final

from raydist.actors.passes.served_pass import Poll

if TYPE_CHECKING:
    from raydist.actors.passes.batch_queues import QueueEntry
    from raydist.actors.passes.served_pass import ServedPass

__all__ = ["DealtSplit", "DealtSplits", "Reader", "SplitDesk"]

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


Reader = tuple[int, int]
"""A worker, and how often it was started before."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class DealtSplit:
    """Consecutive batches of a pass that one reader is given.

    Attributes:
        entry: What they came in.
        begin: How many of that others have used.
    """

    entry: QueueEntry
    begin: int = 0

    @property
    def num_batches(self) -> int:
        """In it."""
        return len(self.entry.states) - self.begin


@dataclass
class _Held:
    """What one reader was given.

    Attributes:
        splits: Those that are not known to be used up, in order.
        before: How many batches came before them.
    """

    splits: deque[DealtSplit] = field(default_factory=deque)
    before: int = 0

    def drop(self, used: int) -> None:
        """So many batches are used for good."""
        while self.splits and self.before + self.splits[0].num_batches <= used:
            self.before += self.splits.popleft().num_batches

    def rest(self, used: int) -> list[DealtSplit]:
        """What is left but so many batches."""
        self.drop(used)
        if self.splits and used > self.before:
            first = self.splits.popleft()
            self.splits.appendleft(replace(first, begin=first.begin + used - self.before))
        return list(self.splits)


@final
class DealtSplits:
    """The splits of one pass.

    Attributes:
        next_place: Of the pass: where the first split begins that nobody was given.
    """

    def __init__(self) -> None:
        self.next_place = 0
        self._held: dict[Reader, _Held] = {}
        self._returned: deque[DealtSplit] = deque()
        self._lost: set[Reader] = set()

    def confirm(self, reader: Reader, used: int) -> None:
        """A reader has used so many batches for good: nobody will need them again."""
        self._of(reader).drop(used)

    def again(self, reader: Reader) -> DealtSplit | None:
        """A split that another one had, for this reader; None where there is none."""
        if not self._returned:
            return None
        split = self._returned.popleft()
        self._of(reader).splits.append(split)
        return split

    def give(self, reader: Reader, entry: QueueEntry) -> DealtSplit:
        """The entry at `next_place` is this reader's; of one that was lost it is the next one's."""
        self.next_place = entry.end
        split = DealtSplit(entry)
        if reader in self._lost:
            self._returned.append(split)
        else:
            self._of(reader).splits.append(split)
        return split

    def lost(self, reader: Reader, used: int) -> None:
        """A reader is gone: what it had, but for so many batches, is for the next that ask."""
        self._lost.add(reader)
        self._returned.extend(self._of(reader).rest(used))
        del self._held[reader]

    def _of(self, reader: Reader) -> _Held:
        return self._held.setdefault(reader, _Held())
