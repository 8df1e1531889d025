"""A host's relay: it passes a driver's messages on to the replicas of its host, and their answers back.

To bring a message to a replica by Ray takes 0.3 ms of the driver and 1.5 ms there (measured among 32 replicas on two
cores); through memory, a tenth of that. So a driver on another host makes one call for all replicas of a host.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from raydist.actors.step_head import answered_by, wants_answer
from raydist.channels.gathering import rest_s
from raydist.channels.hub import ChannelHub
from raydist.channels.sleeper import LOOK_S

__all__ = ["Relayed", "StepRelay"]

_LOST_S = 10.0  # what has not come so long after a later call never will: an interrupt fell into its sending
_PAUSE_S = 60e-6
_COLLECT_S = 1.0
_LOOK_S = 0.1  # how often is looked who lives: a call of the kernel for each replica


@final
@dataclass(frozen=True, slots=True)
class Relayed:
    """What replicas sent back.

    Attributes:
        place: How many a relay had given away before: calls may end in another order.
        messages: The end and the bytes of each.
        num_missing: Answers that are yet to come.
        gone: Ends whose processes are not there any more.
    """

    place: int
    messages: tuple[tuple[int, bytes], ...]
    num_missing: int
    gone: tuple[int, ...]


@final
class StepRelay:
    """Threads may share it: each carries some messages.

    Args:
        hub: Of the replicas, which belongs to the relay from now on.
    """

    def __init__(self, hub: ChannelHub) -> None:
        self._hub = hub
        self._changed = threading.Condition()
        self._next = 1
        self._missing: set[tuple[int, int]] = set()  # ends, and numbers of what they have not answered
        self._inward: list[tuple[int, bytes]] = []
        self._gone: set[int] = set()
        self._is_odd = False  # an answer is to be asked for, or will never come: the driver is to know at once
        self._is_watched = False
        self._looked_at = 0.0
        self._num_given = 0

    def carry(self, number: int, messages: Sequence[tuple[int, bytes]]) -> Relayed:
        """Send messages to ends, and wait for their answers, or until one of all that are awaited is odd.

        Blocks as long as that takes: the driver has the limit, and ends processes. Calls are begun in the order of
        their numbers, from 1 on, though threads may bring them in another.
        """
        self._await_turn(number)
        with self._changed:
            sent = {(end, awaited) for end, message in messages if (awaited := wants_answer(message)) is not None}
            self._missing |= sent
        for end, message in messages:
            self._put(end, message)
        with self._changed:
            self._next = max(self._next, number + 1)
            self._changed.notify_all()
        self._await(lambda: self._is_odd or not sent & self._missing)
        return self._take()

    def collect(self) -> Relayed:
        """Wait for a second at most for what is missing. After an odd answer the others come in this way."""
        end = time.monotonic() + _COLLECT_S
        self._await(lambda: bool(self._inward) or not self._missing or time.monotonic() >= end)
        return self._take()

    def _await_turn(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._next >= number, _LOST_S)

    def _put(self, end: int, message: bytes) -> None:
        """Where an end does not take its messages for so long, the driver's own limits end the wait for answers."""
        deadline = time.monotonic() + _LOST_S
        while not self._hub.put(end, message) and self._hub.lives(end) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)

    def _await(self, is_over: Callable[[], bool]) -> None:
        """One thread watches the hub for all others."""
        while True:
            seen = self._hub.count()
            with self._changed:
                self._look()
                if is_over():
                    return
                if self._is_watched:
                    self._changed.wait(LOOK_S)
                    continue
                self._is_watched, num_missing = True, len(self._missing)
            try:
                self._hub.wait(seen, LOOK_S)
                if rest := rest_s(num_missing):
                    time.sleep(rest)
            finally:
                with self._changed:
                    self._is_watched = False
                    self._changed.notify_all()

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            # Before what they have sent is taken: their last words are among that.
            self._gone = {end for end, _ in self._missing if not self._hub.lives(end)}
        for end in {end for end, _ in self._missing}:
            while (message := self._hub.peek(end)) is not None:
                self._note(end, message)
                self._hub.drop(end)
        self._is_odd |= any(end in self._gone for end, _ in self._missing)

    def _note(self, end: int, message: bytes) -> None:
        number, is_odd = answered_by(message)
        self._missing.discard((end, number))
        self._inward.append((end, message))
        self._is_odd |= is_odd

    def _take(self) -> Relayed:
        with self._changed:
            gone = {end for end, _ in self._missing} & self._gone
            self._missing = {(end, number) for end, number in self._missing if end not in gone}
            self._is_odd &= bool(self._missing)
            messages, self._inward = tuple(self._inward), []
            self._num_given += 1
            return Relayed(self._num_given - 1, messages, len(self._missing), tuple(sorted(gone)))

    def close(self) -> None:
        """Let go of the memory. May be called twice."""
        self._hub.close()
