"""A reader of entries: long polls in groups, with the next question on its way while the last answer is used."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

from raydist.actors.passes.production import Poll
from raydist.errors import DeadlineExceededError

if TYPE_CHECKING:
    from raydist.actors.passes.batch_queues import QueueEntry
    from raydist.actors.passes.link import PipelineLink

__all__ = ["StepReader"]

_SLICE_S = 0.05  # how long a thread that looks ahead goes on after it was stopped


@final
class StepReader:
    """Reads the entries of one pass in order: those of one replica, or of all (the driver).

    Args:
        link: The pass.
        rank: The replica; None for the driver.
        start: Number of the first entry.
        group: Places wanted in one answer.
    """

    def __init__(self, link: PipelineLink, *, rank: int | None, start: int, group: int) -> None:
        self._link = link
        self._rank = rank
        self._group = max(1, group)
        self._next = start
        self._done = start
        self._buffer: deque[QueueEntry] = deque()
        self._asked: Any = None

    @property
    def position(self) -> int:
        """Number of the next entry; the one before it is in use."""
        return self._next

    def next_entry(self) -> QueueEntry:
        """The next entry; the one before it is done with. Waits up to `Timeouts.input_s`.

        The last entry is given again and again.
        """
        entry = self.take()
        self.look_ahead()
        return entry

    def take(self) -> QueueEntry:
        """`next_entry`, without asking for more yet."""
        self._done = self._next
        if not self._buffer:
            self._fill()
        entry = self._buffer[0]
        if not entry.last:
            self._buffer.popleft()
            self._next += 1
        return entry

    def await_entry(self, stopped: Callable[[], bool]) -> QueueEntry | None:
        """The next entry, once it is there; it is not taken. None when `stopped()`, or when it was not asked for."""
        while not self._buffer and self._asked is not None:
            if stopped():
                return None
            if self._link.is_answered(self._asked, _SLICE_S):
                asked, self._asked = self._asked, None
                self._buffer.extend(self._link.receive(asked))
                self._asked = None if self._buffer else self._ask()
        return self._buffer[0] if self._buffer else None

    def _fill(self) -> None:
        deadline = time.monotonic() + self._link.timeouts.input_s
        while not self._buffer:
            asked = self._asked or self._ask()
            self._asked = None
            self._buffer.extend(self._link.receive(asked))
            if not self._buffer and time.monotonic() > deadline:
                raise self.late()

    @property
    def limit_s(self) -> float:
        """How long the next entry may take."""
        return self._link.timeouts.input_s

    def late(self) -> DeadlineExceededError:
        """The error to raise when it took longer."""
        return DeadlineExceededError(
            f"The next element of input pipeline {self._link.name} must come within {self.limit_s:g} s "
            "(Timeouts.input_s), and has not. A function or a file system may be stuck; if it is only slow, use more "
            "input workers or raise the limit."
        )

    def look_ahead(self) -> None:
        """Ask for more while there is something left to work on.

        A question that the producer has no credit for would only be answered empty-handed: `_done` trails the entry in
        use by one, so at most `group` entries beyond it can exist.
        """
        if self._asked is None and len(self._buffer) <= self._group // 2 and not self._holds_last():
            self._asked = self._ask()

    def _holds_last(self) -> bool:
        return bool(self._buffer) and self._buffer[-1].last

    def _ask(self) -> Any:
        start = self._next + len(self._buffer)
        return self._link.ask(Poll(self._rank, start, self._done, self._group, self._link.timeouts.poll_s))

    def give_back(self, method: str, *args: Any) -> None:
        """Forget what was read ahead, and tell the pass how far this reader has come: `method(*args, position)`."""
        self._buffer.clear()
        self._asked = None
        self._link.call(method, *args, self._next)
