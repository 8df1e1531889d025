"""Messages between two ranks: a mailbox with two halves for every direction of every pair.

A message travels in pieces; the first brings its description. Up to two pieces wait in the mailbox, so that a small
message is gone as soon as it is sent.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch

from raydist.collectives.shared_memory.board import Board
from raydist.collectives.shared_memory.layout import CALL_BYTES, pieces
from raydist.collectives.shared_memory.segment import Segment
from raydist.collectives.shared_memory.task import Condition, Steps, Task
from raydist.errors import CollectiveMismatchError

__all__ = ["Mailboxes"]

_HALVES = 2
_TAKEN = 64  # the receiver's counter is on a cache line of its own, behind the sender's


@final
@dataclass(frozen=True, slots=True)
class _Difference(Condition):
    """The sender is ahead of the receiver by at least, or at most, so many pieces."""

    board: Board
    words: int
    partner: int
    least: int = 0
    most: int = _HALVES
    last: bool = False

    def met(self) -> bool:
        ahead = self.board.load(self.words) - self.board.load(self.words + _TAKEN)
        return self.least <= ahead <= self.most

    def missing(self) -> tuple[int, ...]:
        return () if self.met() else (self.partner,)


@final
class Mailboxes:
    """One rank's ends of all mailboxes. Messages of a pair arrive in the order in which they are sent.

    Attributes:
        num_under_way: Messages that are not through yet.
    """

    def __init__(self, segment: Segment, board: Board) -> None:
        self._segment = segment
        self._board = board
        self._layout = board.layout
        self._rank = board.rank
        self._piece_bytes = self._layout.mail_bytes - CALL_BYTES
        self._outgoing: dict[int, deque[Task]] = {}
        self._incoming: dict[int, deque[Task]] = {}
        self.num_under_way = 0

    def send(self, operation: str, data: torch.Tensor, call: str, destination: int) -> Task:
        """Start to send bytes; `call` says what they are."""
        return self._start(self._outgoing, destination, Task(operation, self._send(data, call, destination)))

    def recv(self, operation: str, data: torch.Tensor, call: str, source: int, deliver: Callable[[], None]) -> Task:
        """Start to receive bytes that should be what `call` says, and to call `deliver` when they are there."""
        return self._start(self._incoming, source, Task(operation, self._recv(data, call, source, deliver)))

    def advance(self) -> None:
        """Do all that can be done now."""
        if not self.num_under_way:
            return
        for queues in (self._outgoing, self._incoming):
            for queue in queues.values():
                while queue:
                    queue[0].advance()
                    if not queue[0].done:
                        break
                    queue.popleft()
                    self.num_under_way -= 1

    def conditions(self, task: Task) -> list[Condition]:
        """What a message waits for, or the one before it; nothing where it is not one of these."""
        for queue in (*self._outgoing.values(), *self._incoming.values()):
            if task in queue and queue[0].awaited is not None:
                return [queue[0].awaited]
        return []

    def missing(self, task: Task) -> set[int]:
        """The rank for which a message waits, or those before it do; none where it is not one of these."""
        return {rank for condition in self.conditions(task) for rank in condition.missing()}

    def drop(self) -> None:
        """Let go of all tensors."""
        for queues in (self._outgoing, self._incoming):
            for queue in queues.values():
                for task in queue:
                    task.drop()
                queue.clear()
        self.num_under_way = 0

    def _start(self, queues: dict[int, deque[Task]], partner: int, task: Task) -> Task:
        queues.setdefault(partner, deque()).append(task)
        self.num_under_way += 1
        self.advance()
        return task

    def _send(self, data: torch.Tensor, call: str, destination: int) -> Steps:
        board, words = self._board, self._layout.mail_words(self._rank, destination)
        room = _Difference(board, words, destination, most=_HALVES - 1)
        header = f"{data.numel()}\n{call}".encode()[:CALL_BYTES].ljust(CALL_BYTES)
        for start, length in pieces(data.numel(), self._piece_bytes):
            yield room
            sent = board.load(words)
            place = self._segment.address + self._layout.mail(self._rank, destination, sent % _HALVES)
            if start == 0:
                ctypes.memmove(place, header, CALL_BYTES)
            ctypes.memmove(place + CALL_BYTES, data.data_ptr() + start, length)
            board.store(words, sent + 1)
            board.wake([destination])

    def _recv(self, data: torch.Tensor, call: str, source: int, deliver: Callable[[], None]) -> Steps:
        board, words = self._board, self._layout.mail_words(source, self._rank)
        some = _Difference(board, words, source, least=1)
        yield some
        place = self._place(source, words)
        num_bytes, theirs = ctypes.string_at(place, CALL_BYTES).decode(errors="replace").strip().split("\n", 1)
        fits = int(num_bytes) == data.numel() and theirs == call[: len(theirs)]
        for start, length in pieces(int(num_bytes), self._piece_bytes):
            yield some
            if fits:
                ctypes.memmove(data.data_ptr() + start, self._place(source, words) + CALL_BYTES, length)
            board.store(words + _TAKEN, board.load(words + _TAKEN) + 1)
            board.wake([source])
        # What does not fit has been taken off, so that the next message is not mistaken for it.
        if not fits:
            raise CollectiveMismatchError(
                f"A message must have one shape and dtype on both ends, got {call} on rank {self._rank} for {theirs} "
                f"from rank {source}."
            )
        deliver()

    def _place(self, source: int, words: int) -> int:
        half = self._board.load(words + _TAKEN) % _HALVES
        return self._segment.address + self._layout.mail(source, self._rank, half)
