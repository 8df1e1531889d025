"""Dynamic sharding of an epoch: each split goes to the first reader that asks, once."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, final

from raydist.actors.epochs.served_epoch import Poll

if TYPE_CHECKING:
    from raydist.actors.epochs.served_epoch import Poll, QueueEntry, ServedEpoch

_WAIT_S = 0.25  # for the epoch; other readers' claims wait meanwhile


@final
class SplitServer:
    """The server of the splits of one epoch. Thread-safe.

    Args:
        served: The epoch, which is only read through this object, as one reader.
    """

    def __init__(self, served: ServedEpoch) -> None:
        self._served = served
        self._splits = SplitAssignments()
        self._lock = threading.Lock()

    def claim(self, reader: Reader, used: int) -> InputSplit | None:
        """Return the next split for a reader; None if there is none yet. Every reader gets the end and fatal errors.

        Args:
            reader: The reader that asks.
            used: Number of batches of the reader that need not be repeated.
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
            return InputSplit(entries[0]) if entries[0].last else self._splits.give(reader, entries[0])

    def lost(self, reader: Reader, used: int) -> None:
        """Return the splits of a dead reader to the queue; see `SplitAssignments.lost`."""
        with self._lock:
            self._splits.lost(reader, used)


Reader = tuple[int, int]
"""A worker's index, and the number of its earlier starts."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class InputSplit:
    """Consecutive batches of an epoch for one reader.

    Attributes:
        entry: The queue entry with the batches.
        begin: Number of batches at the start of the entry that other readers have used.
    """

    entry: QueueEntry
    begin: int = 0

    @property
    def num_batches(self) -> int:
        return len(self.entry.states) - self.begin


@dataclass
class _Held:
    """The splits of one reader.

    Attributes:
        splits: Splits that are not completely used, in order.
        before: Number of the reader's batches before these splits.
    """

    splits: deque[InputSplit] = field(default_factory=deque)
    before: int = 0

    def drop(self, used: int) -> None:
        """Drop the splits whose batches are all among the first `used` ones."""
        while self.splits and self.before + self.splits[0].num_batches <= used:
            self.before += self.splits.popleft().num_batches

    def rest(self, used: int) -> list[InputSplit]:
        """Return the splits without the first `used` batches."""
        self.drop(used)
        if self.splits and used > self.before:
            first = self.splits.popleft()
            self.splits.appendleft(replace(first, begin=first.begin + used - self.before))
        return list(self.splits)


@final
class SplitAssignments:
    """The splits of one epoch.

    Attributes:
        next_place: Number of the epoch's first place that no reader was given.
    """

    def __init__(self) -> None:
        self.next_place = 0
        self._held: dict[Reader, _Held] = {}
        self._returned: deque[InputSplit] = deque()
        self._lost: set[Reader] = set()

    def confirm(self, reader: Reader, used: int) -> None:
        """Record that the first `used` batches of a reader need not be repeated."""
        self._of(reader).drop(used)

    def again(self, reader: Reader) -> InputSplit | None:
        """Give a split of a dead reader to this reader and return it; None if there is none."""
        if not self._returned:
            return None
        split = self._returned.popleft()
        self._of(reader).splits.append(split)
        return split

    def give(self, reader: Reader, entry: QueueEntry) -> InputSplit:
        """Give the entry at `next_place` to this reader; for a lost reader, keep it for the next one that asks."""
        self.next_place = entry.end
        split = InputSplit(entry)
        if reader in self._lost:
            self._returned.append(split)
        else:
            self._of(reader).splits.append(split)
        return split

    def lost(self, reader: Reader, used: int) -> None:
        """Keep the splits of a dead reader, without the first `used` batches, for the next readers that ask."""
        self._lost.add(reader)
        self._returned.extend(self._of(reader).rest(used))
        del self._held[reader]

    def _of(self, reader: Reader) -> _Held:
        return self._held.setdefault(reader, _Held())
