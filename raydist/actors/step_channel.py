"""Steps and their results through shared memory, where the driver and all replicas are on one host.

A driver that reads a result of every step waits for a message there and back each time: through memory that takes a
tenth of what two actor calls cost. While it lasts, a replica's actor is inside of one call, `serve`; any other call
ends that first, so that everything is done in the order in which it was asked for.
"""

from __future__ import annotations

import itertools
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, final

from raydist.actors.step_head import DONE, HEAD, LEAVE, MOST_BYTES, STEPS
from raydist.channels.gathering import rest_s
from raydist.channels.hub import Ticket
from raydist.channels.layout import MESSAGES_UNDER_WAY

__all__ = ["Answer", "StepChannel", "StepHub"]

_FREE = 2  # of a replica's slots, before a message is sent: the message's, and one to ask it to leave
_LOOK_S = 0.1  # how often is looked who lives: a call of the kernel for each replica
_AVOIDED = 16  # groups that travel by Ray after a result that was too large for here


class StepHub(Protocol):
    """What the driver's end needs of a :class:`ChannelHub`; all but `flush` are documented there."""

    def put(self, end: int, message: bytes, /) -> bool: ...
    def flush(self) -> None:
        """What was put until now must go."""

    def has_room(self, end: int, messages: int, /) -> bool: ...
    def peek(self, end: int, /) -> bytes | None: ...
    def drop(self, end: int, /) -> None: ...
    def lives(self, end: int, /) -> bool: ...
    def count(self) -> int: ...
    def wait(self, seen: int, seconds: float) -> None: ...
    def ring(self) -> None: ...
    def late_ticket(self, end: int, /) -> Ticket | None:
        """As there; None where the hub can have no other process there."""

    def close(self) -> None: ...


@final
class Answer:
    """What one replica will answer to one message.

    Attributes:
        rank: The replica.
        number: Of the message.
        settled: Whether it is there.
        value: It, where it came through the channel.
        ref: Where Ray has it, or the error, where it did not.
    """

    __slots__ = ("number", "rank", "ref", "settled", "value")

    def __init__(self, rank: int, number: int) -> None:
        self.rank = rank
        self.number = number
        self.settled = False
        self.value: Any = None
        self.ref: Any = None

    def settle(self, value: Any = None, ref: Any = None) -> None:
        """It is there."""
        self.value, self.ref, self.settled = value, ref, True


@final
class StepChannel:
    """The driver's end. Threads may share it.

    An interrupt may fall between any two of its lines: so what was begun is noted before, and what is seen twice is
    known by its number.

    Args:
        hub: Of all replicas, which belongs to the channel from now on.
        num_replicas: How many there are.
        serve: Lets a replica serve, for the turn of this number.
        fetch: Asks a replica, when it is done with all that it was sent, for the result that it has kept of a message.
    """

    def __init__(
        self,
        hub: StepHub,
        num_replicas: int,
        *,
        serve: Callable[[int, int], object],
        fetch: Callable[[int, int], Any],
    ) -> None:
        self._hub = hub
        self._serve = serve
        self._fetch = fetch
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._begun = [0] * num_replicas  # turns
        self._left = [0] * num_replicas
        self._pending: list[deque[Answer]] = [deque() for _ in range(num_replicas)]
        self._num_to_avoid = 0
        self._has_news = False  # answers that came while something was sent
        self._looked_at = 0.0
        self._closed = False

    def send(self, messages: Sequence[bytes | None]) -> list[Answer] | None:
        """Send one message to each replica, in rank order; None where they must travel another way."""
        with self._lock:
            if self._num_to_avoid:
                self._num_to_avoid -= 1
                return None
            if any(message is None or len(message) > MOST_BYTES for message in messages):
                return None
            if self._closed or not all(self._can_take(rank) for rank in range(len(messages))):
                return None
            answers = [self._send(rank, message or b"") for rank, message in enumerate(messages)]
            self._hub.flush()
            return answers

    def send_to(self, rank: int, message: bytes | None) -> Answer | None:
        """Send a message to one replica; None where it must travel another way."""
        with self._lock:
            fits = message is not None and len(message) <= MOST_BYTES
            if self._closed or not fits or not self._can_take(rank):
                return None
            answer = self._send(rank, message or b"")
            self._hub.flush()
            return answer

    def replace(self, rank: int) -> Ticket | None:
        """For the process that takes the place of a replica that has died: its end of the channel, if there is one."""
        with self._lock:
            self._take_all()
            self._give_up(rank)
            self._left[rank] = self._begun[rank]
            return self._hub.late_ticket(rank)

    def await_news(self, within_s: float) -> None:
        """Settle what has come; where that is nothing, wait for so many seconds for something, or for `announce`."""
        seen = self._hub.count()
        if not self._collect_all():
            self._hub.wait(seen, within_s)
            self._collect_all()

    def announce(self) -> None:
        """End an `await_news`. Any thread may call this."""
        with self._lock:
            if not self._closed:
                self._hub.ring()

    def _collect_all(self) -> bool:
        with self._lock:
            before = self._num_pending
            self._collect([answer for pending in self._pending for answer in pending])
            news, self._has_news = self._has_news or self._num_pending < before, False
            return news

    @property
    def _num_pending(self) -> int:
        return sum(map(len, self._pending))

    def _can_take(self, rank: int) -> bool:
        # Each message is answered by one, and an answer that finds no room is lost: so many fit in, and no more.
        if len(self._pending[rank]) >= MESSAGES_UNDER_WAY:
            before = self._num_pending
            self._take_all()
            self._has_news |= self._num_pending < before  # for who awaits some
        unanswered = len(self._pending[rank])
        return unanswered < MESSAGES_UNDER_WAY and self._hub.has_room(rank, _FREE) and self._hub.lives(rank)

    def _send(self, rank: int, message: bytes) -> Answer:
        answer = Answer(rank, next(self._numbers))
        if self._begun[rank] == self._left[rank]:
            self._begun[rank] += 1
            self._serve(rank, self._begun[rank])
        self._pending[rank].append(answer)
        self._hub.put(rank, HEAD.pack(STEPS, answer.number) + message)
        return answer

    def leave(self, rank: int) -> None:
        """What a replica is asked by Ray from now on, it does after all that it was sent here."""
        with self._lock:
            self._leave(rank)
            self._hub.flush()

    def leave_all(self) -> None:
        """What any replica is asked by Ray from now on, it does after all that it was sent here."""
        with self._lock:
            for rank in range(len(self._begun)):
                self._leave(rank)
            self._hub.flush()

    def _leave(self, rank: int) -> None:
        if self._begun[rank] > self._left[rank]:
            self._hub.put(rank, HEAD.pack(LEAVE, self._begun[rank]))
            self._left[rank] = self._begun[rank]

    def wait(self, answers: Sequence[Answer], within_s: float, *, enough: int | None = None) -> bool:
        """Whether `enough` of these (all, unless given) are there within so many seconds."""
        end = time.monotonic() + within_s
        while True:
            seen = self._hub.count()
            self._collect(answers)
            if sum(answer.settled for answer in answers) >= (len(answers) if enough is None else enough):
                return True
            left = end - time.monotonic()
            if left <= 0:
                return False
            self._hub.wait(seen, left)
            if rest := rest_s(len(answers)):
                time.sleep(min(rest, max(end - time.monotonic(), 0.0)))

    def _collect(self, wanted: Iterable[Answer]) -> None:
        with self._lock:
            if self._closed:
                return
            self._take_all()
            now = time.monotonic()
            if now - self._looked_at >= _LOOK_S:
                self._looked_at = now
                self._bury(wanted)

    def _bury(self, wanted: Iterable[Answer]) -> None:
        """Give up what is wanted of replicas that are gone."""
        gone = {answer.rank for answer in wanted if not answer.settled and not self._hub.lives(answer.rank)}
        if gone:
            self._take_all()  # its last words
            for rank in gone:
                self._give_up(rank)

    def _take_all(self) -> None:
        for rank, pending in enumerate(self._pending):
            while pending and (message := self._hub.peek(rank)) is not None:
                self._settle(rank, message)
                self._hub.drop(rank)

    def _settle(self, rank: int, message: bytes) -> None:
        kind, number = HEAD.unpack_from(message)
        pending = self._pending[rank]
        if number != pending[0].number:
            return  # seen before
        if kind == DONE:
            pending[0].settle(pickle.loads(memoryview(message)[HEAD.size :]))
        else:
            self._num_to_avoid = _AVOIDED
            pending[0].settle(ref=self._ask_for(pending[0]))
        pending.popleft()

    def _ask_for(self, answer: Answer) -> Any:
        self.leave(answer.rank)
        return self._fetch(answer.rank, answer.number)

    def _give_up(self, rank: int) -> None:
        """The replica's process is gone: Ray knows why."""
        for answer in self._pending[rank]:
            answer.settle(ref=self._ask_for(answer))
        self._pending[rank].clear()

    def close(self) -> None:
        """Take what has come, and let go of the memory. What has not come never will. May be called twice."""
        with self._lock:
            if not self._closed:
                self._take_all()
                self._closed = True
                self._hub.close()
