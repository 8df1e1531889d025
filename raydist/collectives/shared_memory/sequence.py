"""The collectives of a group, in the order in which every rank calls them."""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from raydist.collectives.shared_memory.board import Board, Count
from raydist.collectives.shared_memory.calls import MARK, is_noted, is_same_call, shown_call
from raydist.collectives.shared_memory.layout import CALL_BYTES, NUM_BAYS, NUM_SLOTS
from raydist.collectives.shared_memory.segment import Segment
from raydist.collectives.shared_memory.task import Condition, Reached, Steps, Task
from raydist.collectives.translation import mismatch_error

__all__ = ["BayUse", "Body", "Brought", "CollectiveSequence", "Gathering"]

# A rank that begins a collective has ended the one so many before it. So when all have begun number k, all have ended
# k - _MOST_UNDER_WAY, and whoever has ended k may write into the slot of k + NUM_SLOTS - _MOST_UNDER_WAY.
_MOST_UNDER_WAY = NUM_SLOTS // 2
_MOST_IN_BAYS = NUM_BAYS // 2  # the same, for bays

Body = Callable[[int], Steps | None]
"""What is done once all ranks are known to have called collective number k; None where nothing has to be waited for."""

Brought = tuple[tuple[int, int], ...]
"""Addresses and numbers of bytes of what a rank writes into its slot."""


class Gathering(Condition):
    """What ranks wait for, where it is more than that all have begun the collective."""

    @abstractmethod
    def come(self, number: int, call: bytes) -> None:
        """This rank has begun collective `number`, with this call: what it brings can be seen. Must not raise."""

    @property
    @abstractmethod
    def agreed(self) -> bool:
        """Whether it is known, once it is met, that all have called the very same."""


@final
@dataclass(slots=True, eq=False)  # not frozen, as `Staged`
class BayUse:
    """That a rank brings a collective's tensor into a bay. Nobody changes it.

    Attributes:
        number: Of the bay, counted over the collectives that use one.
        meeting: What ranks wait for; None where it is that all have come.
    """

    number: int
    meeting: Gathering | None = None


@final
class _Entry:
    """A collective that has been called."""

    def __init__(
        self,
        number: int,
        call: bytes,
        memory: int,
        brought: Brought,
        bay: BayUse | None,
        led: bool,
        task: Task,
    ) -> None:
        self.number = number
        self.call = call
        self.memory = memory
        self.brought = brought
        self.bay = bay
        self.led = led
        self.task = task


@final
class CollectiveSequence:
    """One rank's collectives: begun in order as far as there are slots, and taken further in order."""

    def __init__(self, segment: Segment, board: Board) -> None:
        self._address = segment.address
        self._board = board
        self._called: deque[_Entry] = deque()
        self._begun: deque[_Entry] = deque()
        self._num_called = 0
        self._num_ended = 0
        self._num_bays = 0
        self._num_in_bays = 0

    def next_bay(self) -> int:
        """Number of the bay of the collective that is called next."""
        self._num_bays += 1
        return self._num_bays - 1

    def call(
        self,
        operation: str,
        call: bytes,
        body: Body,
        *,
        brings_all: bool,
        memory: int,
        brought: Brought,
        bay: BayUse | None = None,
        led: bool = False,
    ) -> Task:
        """Start a collective, without waiting.

        Args:
            operation: For messages.
            call: What is compared between ranks: at most `CALL_BYTES - 8` bytes of text.
            body: The rest of it.
            brings_all: Whether others wait for nothing more than what is brought.
            memory: Which shared tensor it is about, 0 for none.
            brought: What is written into the slot, or into the bay.
            bay: Where it goes through one.
            led: Whether the first rank alone waits until all have begun, and is woken then. Its body compares their
                calls, and that of the others waits for what it announces. Else every rank does both before the body.
        """
        number = self._num_called
        self._num_called += 1
        padded = call.ljust(CALL_BYTES - 8)
        task = Task(operation)
        entry = _Entry(number, padded, memory, brought, bay, led, task)
        task.steps = self._steps(entry, body, brings_all=brings_all)
        self._called.append(entry)
        self._begin()
        return task

    def advance(self) -> None:
        """Do all that can be done now."""
        while True:
            if self._called:
                self._begin()
            for entry in self._begun:
                task = entry.task
                task.advance()
                # What others wait for must come in the same order everywhere.
                if task.awaited is not None and not task.awaited.last:
                    break
            ended = self._num_ended
            while self._begun and self._begun[0].task.done:
                self._num_in_bays -= self._begun.popleft().bay is not None
                self._num_ended += 1
            if not self._called or self._num_ended == ended:
                return

    @property
    def num_begun(self) -> int:
        """Collectives under way."""
        return len(self._begun)

    def waits_inside(self, task: Task) -> bool:
        """Whether a collective is the only one, and waits for ranks of the segment."""
        awaited = task.awaited
        alone = len(self._begun) == 1 and self._begun[0].task is task
        return alone and awaited is not None and not awaited.outside()

    def conditions(self, task: Task) -> list[Condition]:
        """What a collective waits for, and those before it; nothing where it is not one of these."""
        conditions = []
        for entry in (*self._begun, *self._called):
            if entry.task.awaited is not None:
                conditions.append(entry.task.awaited)
            if entry.task is task:
                return conditions
        return []

    def missing(self, task: Task) -> set[int]:
        """The ranks for which a collective waits, or those before it do; none where it is not one of these."""
        return {rank for condition in self.conditions(task) for rank in condition.missing()}

    def drop(self) -> None:
        """Let go of all tensors."""
        for entry in (*self._called, *self._begun):
            entry.task.drop()
        self._called.clear()
        self._begun.clear()

    def _begin(self) -> None:
        board = self._board
        while self._called and self._has_room(self._called[0]):
            entry = self._called.popleft()
            rank, bay = board.rank, entry.bay
            at = board.layout.slot(rank, entry.number) if bay is None else board.bays[rank][bay.number % NUM_BAYS]
            place = self._address + at
            for address, num_bytes in entry.brought:
                ctypes.memmove(place, address, num_bytes)
                place += num_bytes
            board.write_call(entry.number, entry.call, entry.memory)
            self._begun.append(entry)
            self._num_in_bays += bay is not None
            meeting = None if bay is None else bay.meeting
            board.reach(Count.ENTERED, entry.number + 1, waking=1 if entry.led else None if meeting is None else 0)
            if meeting is not None:
                meeting.come(entry.number, entry.call)

    def _has_room(self, entry: _Entry) -> bool:
        in_bays = self._num_in_bays < _MOST_IN_BAYS if entry.bay is not None else True
        return in_bays and entry.number - self._num_ended < _MOST_UNDER_WAY

    def _steps(self, entry: _Entry, body: Body, *, brings_all: bool) -> Steps:
        meeting = None if entry.bay is None else entry.bay.meeting
        if not entry.led or self._board.rank == 0:
            yield meeting or Reached(self._board, Count.ENTERED, entry.number + 1, last=brings_all)
        if not entry.led:
            known = meeting is not None and meeting.agreed
            entry.task.noted = self._compare(entry, agreed=known)
        steps = body(entry.number)
        if steps is not None:
            yield from steps

    def _compare(self, entry: _Entry, *, agreed: bool) -> bool:
        """Raise where ranks call different things; whether one of them has marked the call."""
        board, number, call = self._board, entry.number, entry.call
        if agreed or board.all_call(number, call, entry.memory):
            return MARK in call and is_noted(call)
        calls = board.calls_of(number)
        if not all(is_same_call(call, other) for other in calls):
            raise mismatch_error([f"{shown_call(text)} as call {number}" for text in calls])
        return any(map(is_noted, calls))
