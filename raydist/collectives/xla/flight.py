"""The collectives of one rank, under way: met for, launched and awaited in their order."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import final

import torch

from raydist.collectives.xla.chip import Chip
from raydist.collectives.xla.meeting import XlaMeeting
from raydist.errors import FailedPreconditionError, RaydistError

__all__ = ["XlaFlight", "XlaQueue"]


class _Stage(Enum):
    NOTED = "noted"
    ANNOUNCED = "announced"
    LAUNCHED = "launched"
    LANDED = "landed"


@final
class XlaFlight:
    """One collective. Its members other than those of `Flight` are for :class:`XlaQueue`.

    Args:
        queue: Where it waits its turn.
        call: What all ranks must be about to do.
        program: Launches it and returns its result.
    """

    def __init__(self, queue: XlaQueue, call: str, program: Callable[[], torch.Tensor] | None) -> None:
        self.call = call
        self._queue = queue
        self._program = program
        self._stage = _Stage.NOTED
        self._result: torch.Tensor | None = None
        self._error: BaseException | None = None
        self._ran = threading.Event()
        self._deciding = threading.RLock()

    @property
    def result(self) -> torch.Tensor:
        """What the program returned; once it has landed."""
        if self._result is None:
            raise FailedPreconditionError(f"raydist bug: {self.call} must land before its result is read.")
        return self._result

    def landed(self) -> bool:
        return self._stage is _Stage.LANDED

    @property
    def under_way(self) -> bool:
        """Whether it is on the chip."""
        return self._stage is _Stage.LAUNCHED and not self._ran.is_set()

    def settle(self) -> None:
        """See `XlaQueue.settle`."""
        self._queue.settle()

    def give_up(self) -> None:
        """See `XlaQueue.give_up`."""
        self._queue.give_up()

    def wait_slice(self, seconds: float) -> bool:
        landed = self._queue.advance(self, time.monotonic() + seconds)
        if landed and self._error is not None:
            raise self._error
        return landed

    def advance(self, meeting: XlaMeeting, chip: Chip, deadline: float) -> bool:
        """Go on until it has landed, or until `deadline`; whether it has. Its error is for who waits for it."""
        try:
            landed = self._advance(meeting, chip, deadline)
        except (RaydistError, RuntimeError) as error:
            self._error, landed = error, True
        if landed:
            self._stage = _Stage.LANDED
        return landed

    def _advance(self, meeting: XlaMeeting, chip: Chip, deadline: float) -> bool:
        if self._stage is _Stage.NOTED:
            meeting.announce(self.call)
            self._stage = _Stage.ANNOUNCED
        if self._stage is _Stage.ANNOUNCED:
            try:
                if not meeting.all_agree(deadline):
                    return False
            except ConnectionError as error:
                self.withdraw(meeting, chip)
                if self._stage is _Stage.ANNOUNCED:
                    raise RuntimeError(str(error)) from error  # what `Generation` takes for a failure of the group
            self._decide(meeting, chip, go=True)
        return self._ran.wait(max(deadline - time.monotonic(), 0.0))

    def withdraw(self, meeting: XlaMeeting, chip: Chip) -> None:
        """Give up what has been announced; where others go on with it already, so does this rank, for their sake."""
        if self._stage is _Stage.ANNOUNCED:
            self._decide(meeting, chip, go=False)

    def _decide(self, meeting: XlaMeeting, chip: Chip, *, go: bool) -> None:
        with self._deciding:  # the thread that waits, and the one that aborts
            if self._stage is _Stage.ANNOUNCED and meeting.decide(go=go):
                self._stage = _Stage.LAUNCHED
                self._launch(chip)

    def _launch(self, chip: Chip) -> None:
        if self._program is None:
            self._ran.set()
            return
        chip.launch()  # what was noted since `settle`: the collective is to be a program of its own, equal on all chips
        self._result = self._program()
        self._program = None
        # A peer may die in between: the wait for the chip itself has no limit, so it is left to a thread.
        threading.Thread(target=self._await, args=(chip,), name="raydist-xla-collective", daemon=True).start()

    def _await(self, chip: Chip) -> None:
        try:
            chip.wait()
        except BaseException as error:
            self._error = error
        self._ran.set()


@final
class XlaQueue:
    """What one rank has noted, oldest first. Waiting for one goes through all before it.

    Collectives may be noted in the threads of a backward pass. They are launched by who waits for the first of them:
    until then, what they take is still being noted too.

    Args:
        meeting: With the other ranks.
        chip: This rank's.
    """

    def __init__(self, meeting: XlaMeeting, chip: Chip) -> None:
        self._meeting = meeting
        self._chip = chip
        self._waiting: deque[XlaFlight] = deque()
        self._num_unsettled = 0

    def add(self, call: str, program: Callable[[], torch.Tensor] | None) -> XlaFlight:
        """Note a collective; None for a mere meeting."""
        flight = XlaFlight(self, call, program)
        self._waiting.append(flight)
        self._num_unsettled += 1
        return flight

    @property
    def stuck(self) -> bool:
        """Whether a program is on the chip that has not ended."""
        return any(flight.under_way for flight in self._waiting)

    def settle(self) -> None:
        """Run what this rank has noted by itself, so that collectives are programs of their own.

        Blocking: until it has run; that is no other rank's delay, and no part of a collective's time.
        """
        if self._num_unsettled:
            self._num_unsettled = 0
            self._chip.launch()
            self._chip.wait()

    def advance(self, last: XlaFlight, deadline: float) -> bool:
        """Bring all up to `last` to their end, or as far as there is time; whether `last` has landed."""
        while not last.landed():
            if not self._waiting[0].advance(self._meeting, self._chip, deadline):
                return False
            self._waiting.popleft()
        return True

    def give_up(self) -> None:
        """Nobody will wait any more. May be called twice, and from another thread than the one that waits."""
        for flight in tuple(self._waiting)[:1]:
            with contextlib.suppress(RuntimeError):  # the store is gone: then nobody can go on
                flight.withdraw(self._meeting, self._chip)
