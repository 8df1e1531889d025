"""What one worker's input pipeline has sent to where the steps of all workers meet."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from raydist.errors import FailedPreconditionError

if TYPE_CHECKING:
    from raydist.actors.passes.batch_group import BatchGroup
    from raydist.actors.passes.batch_queues import QueueEntry
    from raydist.pipelines.elements.items import IteratorState

__all__ = ["WorkerFeed"]


@final
class WorkerFeed:
    """The entries of one worker's queue, used place by place.

    Attributes:
        state: Of the worker's pipeline, after what was used.
        used: Number of the next place.
        ended: The worker has no more data.
    """

    def __init__(self, state: IteratorState) -> None:
        self.state = state
        self.used = 0
        self.ended = False
        self._entries: deque[QueueEntry] = deque()

    def add(self, entries: Sequence[QueueEntry]) -> None:
        """What the worker has sent: entries in order, after those that it sent before."""
        self._entries.extend(entries)

    @property
    def asks_from(self) -> int:
        """Number of the first place that the worker has not sent."""
        return max(self.used, self._entries[-1].end) if self._entries else self.used

    @property
    def holds_last(self) -> bool:
        """Whether the worker has sent its last entry."""
        return self.ended or (bool(self._entries) and self._entries[-1].last)

    @property
    def waits(self) -> bool:
        """Whether the worker must send something before its next place is known."""
        while self._entries and self._entries[0].end <= self.used:
            self._entries.popleft()
        return not self.ended and not self._entries

    @property
    def entry(self) -> QueueEntry:
        """The entry with the next place, which must be here."""
        if self.waits or self.ended:
            raise FailedPreconditionError(f"raydist bug: a worker must have sent place {self.used}, and has not.")
        return self._entries[0]

    @property
    def group(self) -> BatchGroup:
        """The steps of the entry, which must be some."""
        group = self.entry.group
        if group is None:
            raise FailedPreconditionError(f"raydist bug: place {self.used} of a worker must be a step, and is none.")
        return group

    @property
    def place(self) -> int:
        """Of the next step in its group."""
        return self.used - self.entry.number

    @property
    def num_steps(self) -> int:
        """Steps of the group that are left."""
        return len(self.group.rows) - self.place

    def state_after(self, num_places: int) -> IteratorState:
        """The state of the worker's pipeline when so many more places of the entry are used."""
        return self.entry.states[self.place + num_places - 1] or self.state if num_places else self.state

    def use(self, num_places: int) -> None:
        """Go on behind so many places of the entry."""
        entry = self.entry
        self.state = self.state_after(num_places)
        self.used += num_places
        self.ended = entry.last and entry.error is None
