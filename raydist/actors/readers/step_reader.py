"""A reader of places by long polls; the next poll is under way while the last answer is used."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from raydist.actors.epochs.batch_group import StepBatch
from raydist.actors.epochs.served_epoch import Poll
from raydist.core.errors import DeadlineExceededError

if TYPE_CHECKING:
    from raydist.actors.epochs.link import PipelineLink
    from raydist.actors.epochs.served_epoch import QueueEntry
    from raydist.pipelines.elements.items import IteratorState

_FEW = 2  # remaining places at which the reader acknowledges, so that the pipeline can go on
_TELL_S = 0.005  # between acknowledgements; a call costs a millisecond of all processes together
_ANSWER_S = 0.002  # a reader that waits longer for an answer acknowledges first


@final
@dataclass(frozen=True, slots=True, eq=False)
class ReadPlace:
    """The result of one call of `next`.

    Attributes:
        number: Number of places before this one.
        state: State of the pipeline after this place.
        batch: The step; None for an error or the end.
        entry: The queue entry with this place.
    """

    number: int
    state: IteratorState
    batch: StepBatch | None
    entry: QueueEntry

    @property
    def last(self) -> bool:
        return self.entry.last


@final
class StepReader:
    """A reader of the places of one epoch in order, for one replica or (on the driver) for all.

    Args:
        link: Link to the epoch.
        rank: Rank of the replica; None for the driver.
        start: Number of the first place.
    """

    def __init__(self, link: PipelineLink, *, rank: int | None, start: int) -> None:
        self._link = link
        self._rank = rank
        self._next = start
        self._done = start
        self._told = start
        self._told_s = 0.0
        self._entries: deque[QueueEntry] = deque()
        self._asked: Any = None
        self._pace = _Pace()

    @property
    def position(self) -> int:
        """The number of the next place; the place before it is in use."""
        return self._next

    def next_place(self) -> ReadPlace:
        """Return the next place and finish the one before it. Blocks for at most `Timeouts.input_s`.

        After the last place, every call returns the last place again.
        """
        place = self.take()
        self.look_ahead()
        return place

    def take(self) -> ReadPlace:
        """Do `next_place` without sending the next poll."""
        self.work_ends()
        self._done = self._next
        place = self.peek()
        if place is None:
            self._fill()
            place = self._place(self._entries[0])
        if not place.last:
            self._next += 1
        if self._entries[-1].end - self._next <= _FEW and time.monotonic() - self._told_s > _TELL_S:
            self._tell_done()
        self._pace.work_begins()
        return place

    def work_ends(self) -> None:
        """Record that the consumer has finished its work on the last place and waits from now on."""
        self._pace.work_ends()

    def peek(self) -> ReadPlace | None:
        """Return the next place without taking it; None if it has not arrived."""
        while self._entries and self._entries[0].end <= self._next:
            self._entries.popleft()
        return self._place(self._entries[0]) if self._entries else None

    def _place(self, entry: QueueEntry) -> ReadPlace:
        at = self._next - entry.number
        return ReadPlace(self._next, entry.states[at], StepBatch(entry.group, at) if entry.group else None, entry)

    def await_place(self, stop: Future[None]) -> ReadPlace | None:
        """Wait for the next place and return it without taking it; None once `stop` is done, or if no poll was sent."""
        place = self.peek()
        while place is None and self._asked is not None:
            if not self._is_answered(self._asked, stop):
                return None
            asked, self._asked = self._asked, None
            self._receive(asked)
            place = self.peek()
            self._asked = None if place else self._ask()
        return place

    def _fill(self) -> None:
        deadline = time.monotonic() + self._link.timeouts.input_s
        while not self._entries:
            asked = self._asked = self._asked or self._ask()
            self._is_answered(asked)
            self._asked = None
            self._receive(asked)
            if not self._entries and time.monotonic() > deadline:
                raise self.late()

    def _is_answered(self, asked: Any, stop: Future[None] | None = None) -> bool:
        """Block until `asked` is answered, and acknowledge if that takes long; return False if `stop` is done first."""
        if self._link.is_answered(asked, stop, _ANSWER_S):
            return True
        self._tell_done()
        return bool(self._link.is_answered(asked, stop))

    def _tell_done(self) -> None:
        """Acknowledge places while a poll is under way: an epoch without credits left would otherwise not continue."""
        if self._asked is not None and self._told < self._done:
            self._told, self._told_s = self._done, time.monotonic()
            self._link.acknowledge(self._asked, self._rank, self._done)

    def _receive(self, asked: Any) -> None:
        self._entries.extend(self._link.receive(asked))

    @property
    def limit_s(self) -> float:
        """The limit for the next place in seconds."""
        return self._link.timeouts.input_s

    def late(self) -> DeadlineExceededError:
        """Return the error for a place that took longer than the limit."""
        return DeadlineExceededError(
            f"The next element of input pipeline {self._link.name} must come within {self.limit_s:g} s "
            "(Timeouts.input_s), and has not. A function or a file system may be stuck; if it is only slow, use more "
            "input workers or raise the limit."
        )

    def look_ahead(self) -> None:
        """Send the next poll, which also acknowledges, once the last group that has arrived is in use."""
        if self._asked is None and len(self._entries) <= 1 and not self._holds_last():
            self._asked = self._ask()

    def _holds_last(self) -> bool:
        return bool(self._entries) and self._entries[-1].last

    def _ask(self) -> Any:
        start = max(self._next, self._entries[-1].end) if self._entries else self._next
        self._told, self._told_s = self._done, time.monotonic()
        return self._link.ask(Poll(self._rank, start, self._done, self._link.timeouts.poll_s, self._pace.mean_s()))

    def give_back(self, method: str, *args: Any) -> None:
        """Drop the places read ahead, and send this reader's position to the epoch: `method(*args, position)`."""
        self._entries.clear()
        self._asked = None
        self._link.call(method, *args, self._next)


@final
class _Pace:
    """The mean seconds of the reader's work on a place, without waits."""

    def __init__(self) -> None:
        self._begun_s: float | None = None
        self._work_s = 0.0
        self._count = 0
        self._mean_s: float | None = None

    def work_begins(self) -> None:
        self._begun_s = time.monotonic()

    def work_ends(self) -> None:
        if self._begun_s is not None:
            self._work_s += time.monotonic() - self._begun_s
            self._count += 1
            self._begun_s = None

    def mean_s(self) -> float | None:
        """Return the mean over the places since the last call; the previous mean if there are none, or None."""
        if self._count:
            self._mean_s, self._work_s, self._count = self._work_s / self._count, 0.0, 0
        return self._mean_s
