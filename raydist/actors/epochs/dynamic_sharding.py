"""Dynamic sharding of an epoch: the next split goes to the reader that asks first.

Each split goes to one reader. If that reader dies, the unused batches of the split go to another reader.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, final

from raydist.actors.epochs.served_epoch import Poll

if TYPE_CHECKING:
    from raydist.actors.epochs.served_epoch import QueueEntry, ServedEpoch

_WAIT_S = 0.25  # longest wait for the next entry of the epoch; claims of other readers wait, too


@final
class SplitServer:
    """A server that gives the splits of one epoch to the readers that ask. Thread-safe.

    Args:
        epoch: The epoch. Only this object reads it, as its single reader.
    """

    def __init__(self, epoch: ServedEpoch) -> None:
        self._epoch = epoch
        self._splits = SplitAssignments()
        self._lock = threading.Lock()

    def claim(self, reader: Reader, used: int) -> InputSplit | None:
        """Return the next split for a reader; None if no split is ready.

        The split with the end of the epoch, or with a fatal error, goes to every reader.

        Args:
            reader: The reader that asks.
            used: Number of the reader's batches that no other reader must repeat if this reader dies.
        """
        with self._lock:
            self._splits.confirm(reader, used)
            returned = self._splits.assign_returned(reader)
            if returned is not None:
                return returned
            place = self._splits.next_place
            entries = self._epoch.poll(Poll(0, start=place, done=place, wait_s=_WAIT_S))
            if not entries:
                return None
            return InputSplit(entries[0]) if entries[0].last else self._splits.assign_next(reader, entries[0])

    def return_splits(self, reader: Reader, used: int) -> None:
        """Take back the splits of a dead reader; see `SplitAssignments.return_splits`."""
        with self._lock:
            self._splits.return_splits(reader, used)


Reader = tuple[int, int]
"""A reader: the index of its worker, and the number of earlier starts of that worker."""


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
class _AssignedSplits:
    """The splits that one reader has and has not used completely.

    Attributes:
        splits: These splits, in order.
        before: Number of the reader's batches before these splits.
    """

    splits: deque[InputSplit] = field(default_factory=deque)
    before: int = 0

    def drop(self, used: int) -> None:
        """Drop each split whose batches are all among the first `used` batches of the reader."""
        while self.splits and self.before + self.splits[0].num_batches <= used:
            self.before += self.splits.popleft().num_batches

    def unused(self, used: int) -> list[InputSplit]:
        """Return the splits without the first `used` batches of the reader."""
        self.drop(used)
        if self.splits and used > self.before:
            first = self.splits.popleft()
            self.splits.appendleft(replace(first, begin=first.begin + used - self.before))
        return list(self.splits)


@final
class SplitAssignments:
    """The assignment of one epoch's splits to readers.

    Attributes:
        next_place: Number of the first place in the epoch that no reader has got.
    """

    def __init__(self) -> None:
        self.next_place = 0
        self._assigned: dict[Reader, _AssignedSplits] = {}
        self._returned: deque[InputSplit] = deque()
        self._dead: set[Reader] = set()

    def confirm(self, reader: Reader, used: int) -> None:
        """Record that no other reader must repeat the first `used` batches of this reader."""
        self._splits_of(reader).drop(used)

    def assign_returned(self, reader: Reader) -> InputSplit | None:
        """Assign a split of a dead reader to this reader, and return the split; None if there is none.

        A dead reader, whose request arrives late, gets none: nobody would return the split once more.
        """
        if not self._returned or reader in self._dead:
            return None
        split = self._returned.popleft()
        self._splits_of(reader).splits.append(split)
        return split

    def assign_next(self, reader: Reader, entry: QueueEntry) -> InputSplit:
        """Assign the entry at `next_place` to this reader. If the reader is dead, the next reader that asks gets it."""
        self.next_place = entry.end
        split = InputSplit(entry)
        if reader in self._dead:
            self._returned.append(split)
        else:
            self._splits_of(reader).splits.append(split)
        return split

    def return_splits(self, reader: Reader, used: int) -> None:
        """Keep the splits of a dead reader, without its first `used` batches, for the next readers that ask."""
        self._dead.add(reader)
        self._returned.extend(self._splits_of(reader).unused(used))
        del self._assigned[reader]

    def _splits_of(self, reader: Reader) -> _AssignedSplits:
        return self._assigned.setdefault(reader, _AssignedSplits())
