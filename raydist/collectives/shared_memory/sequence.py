"""The collectives of a group, in the order in which every rank calls them."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from typing import final

from raydist.collectives.shared_memory.board import Board, Count
from raydist.collectives.shared_memory.layout import CALL_BYTES, NUM_SLOTS
from raydist.collectives.shared_memory.segment import Segment
from raydist.collectives.shared_memory.task import Reached, Steps, Task
from raydist.collectives.translation import mismatch_error

__all__ = ["Body", "Brought", "CollectiveSequence"]

# A rank that begins a collective has ended the one so many before it. So when all have begun number k, all have ended
# k - _MOST_UNDER_WAY, and whoever has ended k may write into the slot of k + NUM_SLOTS - _MOST_UNDER_WAY.
_MOST_UNDER_WAY = NUM_SLOTS // 2

Body = Callable[[int], Steps | None]
"""What is done once all ranks are known to have called collective number k; None where nothing has to be waited for."""

Brought = tuple[tuple[int, int], ...]
"""Addresses and numbers of bytes of what a rank writes into its slot."""


@final
class _Entry:
    """A collective that has been called."""

    def __init__(self, number: int, call: bytes, memory: int, brought: Brought, task: Task) -> None:
        self.number = number
        self.call = call
        self.memory = memory
        self.brought = brought
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

    def call(self, operation: str, call: bytes, body: Body, *, brings_all: bool, memory: int, brought: Brought) -> Task:
        """Start a collective, without waiting.

        Args:
            operation: For messages.
            call: What is compared between ranks: at most `CALL_BYTES - 8` bytes of text.
            body: The rest of it.
            brings_all: Whether others wait for nothing more than what is brought.
            memory: Which shared tensor it is about, 0 for none.
            brought: What is written into the slot.
        """
        number = self._num_called
        self._num_called += 1
        padded = call.ljust(CALL_BYTES - 8)
        task = Task(operation, self._steps(number, padded, body, brings_all=brings_all))
        self._called.append(_Entry(number, padded, memory, brought, task))
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
                self._begun.popleft()
                self._num_ended += 1
            if not self._called or self._num_ended == ended:
                return

    @property
    def num_begun(self) -> int:
        """Collectives under way."""
        return len(self._begun)

    def missing(self, task: Task) -> set[int]:
        """The ranks for which a collective waits, or those before it do; none where it is not one of these."""
        missing: set[int] = set()
        for entry in (*self._begun, *self._called):
            if entry.task.awaited is not None:
                missing.update(entry.task.awaited.missing())
            if entry.task is task:
                return missing
        return set()

    def drop(self) -> None:
        """Let go of all tensors."""
        for entry in (*self._called, *self._begun):
            entry.task.drop()
        self._called.clear()
        self._begun.clear()

    def _begin(self) -> None:
        while self._called and self._called[0].number - self._num_ended < _MOST_UNDER_WAY:
            entry = self._called.popleft()
            place = self._address + self._board.layout.slot(self._board.rank, entry.number) + CALL_BYTES
            for address, num_bytes in entry.brought:
                ctypes.memmove(place, address, num_bytes)
                place += num_bytes
            self._board.write_call(entry.number, entry.call, entry.memory)
            self._board.reach(Count.ENTERED, entry.number + 1)
            self._begun.append(entry)

    def _steps(self, number: int, call: bytes, body: Body, *, brings_all: bool) -> Steps:
        yield Reached(self._board, Count.ENTERED, number + 1, last=brings_all)
        board = self._board
        calls = [board.call_of(rank, number) for rank in range(board.layout.world_size)]
        if calls.count(call) < len(calls):
            raise mismatch_error([f"{text.decode(errors='replace').strip()} as call {number}" for text in calls])
        steps = body(number)
        if steps is not None:
            yield from steps
