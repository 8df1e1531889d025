"""A worker's side of a lane: requests to a server of its host, and reads of values from shared memory."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from raydist.channels.ring import Ring
from raydist.channels.sleeper import LOOK_S, Sleeper
from raydist.collectives.shared_memory.control import Bell
from raydist.errors import UnavailableError
from raydist.parameter_servers.lanes.area import ReadArea, WriteArea
from raydist.parameter_servers.lanes.message import pack_message, unpack_message
from raydist.parameter_servers.lanes.quick_pickle import QuickPickler
from raydist.parameter_servers.lanes.ticket import HALL_BELL, HALL_BYTES, LANE, READS, SERVER, WORKER, LaneTicket
from raydist.parameter_servers.link import Awaited, Into, ServerDoor, ServerLink, gone, pulled_by, too_late
from raydist.parameter_servers.requests import LocateSlices, Pull, ServerAnswer, ServerRequest
from raydist.parameter_servers.shared_slices import SharedSlices
from raydist.shared_segment import Segment

__all__ = ["LaneDoor", "LaneLink"]

_log = logging.getLogger("raydist")


@final
@dataclass(frozen=True, slots=True)
class LaneDoor:
    """An opener of a lane, with a fallback for processes that cannot share memory.

    Attributes:
        ticket: The server's ticket; for one process, once.
        other: The fallback: containers of one host may have their own process numbers.
    """

    ticket: LaneTicket
    other: ServerDoor | None = None

    def open(self) -> ServerLink:
        """Implement `ServerDoor.open`."""
        try:
            return LaneLink.open(self.ticket)
        except UnavailableError as error:
            if self.other is None:
                raise
            _log.warning("Parameters do not travel through shared memory: %s", error)
            return self.other.open()


@final
class LaneLink:
    """A connection to a server of the same host. Made by :meth:`open`.

    Args:
        ticket: The ticket of the lane.
        segment: The lane's memory.
        hall: The memory with the server's bell.
    """

    def __init__(self, ticket: LaneTicket, segment: Segment, hall: Segment) -> None:
        self.name = ticket.server
        self._segment = segment
        self._hall = hall
        self._in = Ring(segment.address + LANE.ring(0, inward=False))
        self._out = Ring(segment.address + LANE.ring(0, inward=True))
        self._server_bell = Bell(hall.address + HALL_BELL)
        self._sleeper = Sleeper(Bell(segment.address + LANE.bell(WORKER)))
        self._requests, self._answers = WriteArea(), ReadArea()
        self._pickler = QuickPickler()
        self._number = self._answered = 0
        self._turn = threading.RLock()
        self._slices: SharedSlices | None = None
        self._located: frozenset[int] = frozenset()
        self._reads = segment.bytes()[READS : READS + 16].cast("Q")

    @staticmethod
    def open(ticket: LaneTicket) -> LaneLink:
        """Open the worker's side of a lane.

        Raises:
            UnavailableError: This process cannot open the server's memory, or the server is gone.
        """
        try:
            segment = Segment.open(ticket.name, LANE.size, ticket.token)
            hall = Segment.open(ticket.hall, HALL_BYTES, ticket.hall_token)
        except OSError as error:
            raise UnavailableError(
                f"The memory of {ticket.server} must be open to workers of its host, but {ticket.name} cannot be "
                f"opened: {error.strerror or error}. If it is in another container or belongs to another user, let "
                "them be the same; if it has died, restore from a checkpoint.",
                actor=ticket.server,
            ) from error
        segment.hold(WORKER)
        return LaneLink(ticket, segment, hall)

    def ask(self, request: ServerRequest, tensors: Sequence[torch.Tensor] = (), into: Into | None = None) -> Awaited:
        """Implement `ServerLink.ask`."""
        numbers = pulled_by(request) if into is not None else ()
        if into is None or not numbers:
            return _AskedThere(self, self._send(request, tensors))
        targets = into if len(into) == len(numbers) else {number: into[number] for number in numbers}
        unless = request.unless if isinstance(request, Pull) else -1
        if isinstance(request, Pull) and request.sender is None and not request.at_least_step:
            return _Read(self, targets, unless)
        return _Read(self, targets, unless, self._send(request, tensors, reads=True))

    def _send(self, request: ServerRequest, tensors: Sequence[torch.Tensor] = (), *, reads: bool = False) -> int:
        """Send a request and return its number. With `reads`, the answer has no values: this process reads them."""
        with self._turn:
            while (message := self._in.peek()) is not None:  # answers for which nobody waits any more
                self._answered = self._unpack(message)[0][0]
                self._in.drop()
            if self._answered == self._number:
                self._requests.all_read()
            else:  # the server may still read the tensors of the unanswered request
                self._requests.leave()
            self._number += 1
            message = pack_message((self._number, request, reads), tensors, self._requests, self._pickler.dumps)
            if not self._out.put(message):
                raise too_late(self.name, 0)
            self._server_bell.ring()
            return self._number

    def await_answer(self, number: int, timeout_s: float) -> tuple[ServerAnswer, Sequence[torch.Tensor]]:
        """Return the answer to a message; skip answers to earlier messages."""
        end = time.monotonic() + timeout_s
        while True:
            seen = self._sleeper.count()
            message = self._in.peek()
            if message is not None:
                (told, answer, error), tensors = self._unpack(message)
                self._in.drop()
                self._answered = max(told, self._answered)
                if told not in (number, -1):
                    continue
                if error is not None:
                    raise error
                return answer, tensors
            self._wait(seen, end, timeout_s)

    def _unpack(self, message: bytes) -> Any:
        return unpack_message(message, self._answers)

    def _wait(self, seen: int, end: float, timeout_s: float) -> None:
        left = end - time.monotonic()
        if left <= 0:
            raise too_late(self.name, timeout_s)
        self._sleeper.wait(seen, min(left, LOOK_S))
        if self._in.is_empty and not self._segment.holds(SERVER) and self._in.is_empty:
            raise gone(self.name)

    def read(self, into: Into, unless: int, timeout_s: float) -> tuple[int | None, int]:
        """Copy values; return their version (None if it is `unless`) and step."""
        with self._turn:
            slices = self._slices
            if slices is None or not into.keys() <= self._located:
                slices = self._locate(timeout_s)
            while True:
                step = slices.step
                version = slices.read_into(into, unless_version=unless, timeout_s=timeout_s)
                if slices.step == step:
                    return version, step

    def count_read(self, into: Into) -> None:
        """Count a read that the server does not see."""
        self._reads[0] += 1
        self._reads[1] += sum(tensor.nbytes for tensor in into.values())

    def _locate(self, timeout_s: float) -> SharedSlices:
        answer, _ = self.await_answer(self._send(LocateSlices()), timeout_s)
        if self._slices is not None:
            self._slices.close()
        self._slices = SharedSlices.open(answer.value)
        self._located = self._slices.slices
        return self._slices

    def close(self) -> None:
        """Implement `ServerLink.close`."""
        self._segment.close()
        self._hall.close()
        self._requests.close()
        self._answers.close()
        if self._slices is not None:
            self._slices.close()


@final
@dataclass(frozen=True, slots=True)
class _AskedThere:
    """A pending request whose answer comes through the lane."""

    link: LaneLink
    number: int

    def answer(self, timeout_s: float) -> tuple[ServerAnswer, Sequence[torch.Tensor]]:
        return self.link.await_answer(self.number, timeout_s)


@final
@dataclass(frozen=True, slots=True)
class _Read:
    """A read from shared memory, after the server's answer to message `number`, if there is one."""

    link: LaneLink
    into: Into
    unless: int
    number: int = -1

    def answer(self, timeout_s: float) -> tuple[ServerAnswer, Sequence[torch.Tensor]]:
        said = ServerAnswer()
        if self.number >= 0:
            said, _ = self.link.await_answer(self.number, timeout_s)
        version, step = self.link.read(self.into, self.unless, timeout_s)
        if version is None:
            version = self.unless
        elif self.number < 0:
            self.link.count_read(self.into)
        return ServerAnswer(version, said.verdict, step, said.completes, said.value), ()
