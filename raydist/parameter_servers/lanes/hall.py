"""A server's side of its lanes, and the thread that handles requests from lanes and jobs, one at a time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import final

from raydist.channels.ring import Ring
from raydist.channels.sleeper import LOOK_S, Sleeper
from raydist.collectives.shared_memory.control import Bell, why_unsupported
from raydist.parameter_servers.desk import Outcome, ServerDesk
from raydist.parameter_servers.lanes.area import ReadArea, WriteArea
from raydist.parameter_servers.lanes.message import pack_message, portable, unpack_message
from raydist.parameter_servers.lanes.quick_pickle import QuickPickler
from raydist.parameter_servers.lanes.ticket import HALL_BELL, HALL_BYTES, LANE, READS, SERVER, WORKER, LaneTicket
from raydist.parameter_servers.requests import ServerAnswer
from raydist.shared_segment import Segment

__all__ = ["Hall"]

_TO_OPEN_S = 60.0  # a lane that nobody has opened by then is dropped


@final
class Hall:
    """A server's request loop. Made by :meth:`open`, which starts nothing; a thread runs :meth:`serve`.

    Args:
        desk: The server's dispatcher, which only this thread uses.
        name: Name of the server, for messages.
        segment: The memory of the bell; None if processes cannot share memory: then there are no lanes.
    """

    def __init__(self, desk: ServerDesk, name: str, segment: Segment | None) -> None:
        self._desk = desk
        self._name = name
        self._segment = segment
        self._lock = threading.Lock()
        self._lanes: list[_Lane] = []
        self._jobs: deque[Callable[[], None]] = deque()
        self._stopped = False
        self._woken = threading.Event()
        self._past_reads = 0, 0
        self._bell = None if segment is None else Bell(segment.address + HALL_BELL)
        self._sleeper = None if self._bell is None else Sleeper(self._bell)

    @staticmethod
    def open(desk: ServerDesk, name: str) -> Hall:
        """Create a request loop without lanes."""
        if why_unsupported() is not None:
            return Hall(desk, name, None)
        segment = Segment.create_nameless(HALL_BYTES)
        segment.hold(SERVER)
        return Hall(desk, name, segment)

    def open_lane(self) -> LaneTicket | None:
        """Create a lane for one process of this host; None if processes cannot share memory. From any thread."""
        if self._segment is None:
            return None
        segment = Segment.create_nameless(LANE.size)
        segment.hold(SERVER)
        with self._lock:
            self._lanes = [*self._lanes, _Lane(segment)]
        return LaneTicket(self._name, segment.name, segment.token, self._segment.name, self._segment.token)

    def submit(self, job: Callable[[ServerDesk], None]) -> None:
        """Run a job with the dispatcher in the serving thread. From any thread; does not block."""
        self._jobs.append(lambda: job(self._desk))
        self._wake()

    def reads(self) -> tuple[int, int]:
        """Return the number of reads that processes made from shared memory without a request, and their bytes."""
        with self._lock:
            return _added([self._past_reads, *(lane.reads() for lane in self._lanes)])

    def serve(self) -> None:
        """Handle requests until :meth:`stop`. Blocks."""
        look_at = 0.0
        while not self._stopped:
            seen = 0 if self._sleeper is None else self._sleeper.count()
            self._woken.clear()
            if self._serve_once():
                continue
            if time.monotonic() > look_at:
                look_at = time.monotonic() + LOOK_S
                self._drop_dead()
            self._sleep(seen)
        self._close()

    def stop(self) -> None:
        """Make :meth:`serve` return and close all lanes. From any thread; may be called twice."""
        self._stopped = True
        self._wake()

    def _wake(self) -> None:
        self._woken.set()
        if self._bell is not None:
            self._bell.ring()

    def _sleep(self, seen: int) -> None:
        if self._sleeper is None:
            self._woken.wait(LOOK_S)
        else:
            self._sleeper.wait(seen, LOOK_S)

    def _serve_once(self) -> bool:
        """Handle what is there; return True if there was anything."""
        busy = False
        while self._jobs:
            self._jobs.popleft()()
            busy = True
        for lane in self._lanes:
            message = lane.take()
            if message is not None:
                lane.serve(message, self._desk)
                busy = True
        return busy

    def _drop_dead(self) -> None:
        with self._lock:
            dead = [lane for lane in self._lanes if not lane.lives()]
            if dead:
                self._lanes = [lane for lane in self._lanes if lane not in dead]
                self._past_reads = _added([self._past_reads, *(lane.reads() for lane in dead)])
        for lane in dead:
            lane.close()

    def _close(self) -> None:
        with self._lock:
            lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.close()
        if self._segment is not None:
            self._segment.close()


@final
class _Lane:
    """The server's side of one lane. It carries one request at a time."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._in = Ring(segment.address + LANE.ring(0, inward=True))
        self._out = Ring(segment.address + LANE.ring(0, inward=False))
        self._bell = Bell(segment.address + LANE.bell(WORKER))
        self._requests, self._answers = ReadArea(), WriteArea()
        self._pickler = QuickPickler()
        self._reads = segment.bytes()[READS : READS + 16].cast("Q")
        self._opened = False
        self._until = time.monotonic() + _TO_OPEN_S

    def take(self) -> bytes | None:
        message = self._in.peek()
        if message is not None:
            self._in.drop()
        return message

    def serve(self, message: bytes, desk: ServerDesk) -> None:
        number = -1
        try:
            (number, request, reads), tensors = unpack_message(message, self._requests)
        except Exception as error:
            self._tell(number, Outcome(ServerAnswer(), error=error))
            return
        desk.take(request, tensors, lambda outcome: self._tell(number, outcome, reads=reads))

    def _tell(self, number: int, outcome: Outcome, *, reads: bool = False) -> None:
        try:
            message = self._packed(number, outcome, reads=reads)
        except Exception as error:  # the error concerns only this sender: the server must go on for all others
            self._answers.forget()
            message = self._packed(number, Outcome(ServerAnswer(), error=error), reads=reads)
        self._out.put(message)
        self._bell.ring()

    def _packed(self, number: int, outcome: Outcome, *, reads: bool) -> bytes:
        error = None if outcome.error is None else portable(outcome.error)
        tensors = () if reads else outcome.tensors
        return pack_message((number, outcome.answer, error), tensors, self._answers, self._pickler.dumps)

    def lives(self) -> bool:
        """Return True while the process at the other end has the lane open, or may still open it."""
        holds = self._segment.holds(WORKER)
        self._opened = self._opened or holds
        return holds or (not self._opened and time.monotonic() < self._until)

    def reads(self) -> tuple[int, int]:
        """Return the number of reads of this lane's process, and their bytes."""
        return self._reads[0], self._reads[1]

    def close(self) -> None:
        self._segment.close()
        self._requests.close()
        self._answers.close()


def _added(counts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return sum(reads for reads, _ in counts), sum(num_bytes for _, num_bytes in counts)
