"""A process in the middle and others around it, of one host, which pass short messages through memory they share.

A message costs some 20 us of both sides' time, where an actor call costs some 500 (measured on two cores). What is
written must be small; nobody ever waits for room; the death of a member is seen by the lock that the kernel lets go of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, final

from raydist.channels.layout import ChannelLayout
from raydist.channels.ring import Ring
from raydist.channels.sleeper import LOOK_S, Sleeper
from raydist.collectives.shared_memory.futex import Bell, why_unsupported
from raydist.collectives.shared_memory.segment import Segment, remove_leftovers

__all__ = ["ChannelEnd", "ChannelHub", "Ticket"]


@final
@dataclass(frozen=True, slots=True)
class Ticket:
    """What an end is opened with.

    Attributes:
        name: Of the file.
        token: What it begins with.
        num_ends: Ends of the hub.
        end: Which of them this is for.
    """

    name: str
    token: bytes
    num_ends: int
    end: int


@final
class ChannelHub:
    """The process in the middle. Made by :meth:`open`.

    Args:
        segment: The memory, which belongs to the hub from now on.
        num_ends: How many ends there may be.
    """

    def __init__(self, segment: Segment, num_ends: int) -> None:
        self._segment = segment
        self._num_ends = num_ends
        layout = ChannelLayout(num_ends)
        self._bells = [Bell(segment.address + layout.bell(1 + end)) for end in range(num_ends)]
        self._out = [Ring(segment.address + layout.ring(end, inward=False)) for end in range(num_ends)]
        self._in = [Ring(segment.address + layout.ring(end, inward=True)) for end in range(num_ends)]
        self._bell = Bell(segment.address + layout.bell(0))
        self._sleeper = Sleeper(self._bell, num_ends)

    @classmethod
    def open(cls, num_ends: int) -> Self:
        """New memory for so many ends.

        Raises:
            OSError: There is none, or this machine cannot share any in this way.
        """
        reason = why_unsupported()
        if reason is not None:
            raise OSError(f"Processes cannot share memory here: {reason}.")
        remove_leftovers()
        segment = Segment.create(ChannelLayout(num_ends).size)
        segment.hold(0)
        return cls(segment, num_ends)

    def ticket(self, end: int) -> Ticket:
        """For the process that is to be this end."""
        return Ticket(self._segment.name, self._segment.token, self._num_ends, end)

    def late_ticket(self, end: int) -> Ticket:
        """For a process that takes the place of one that has died, once the file has no name any more.

        What the dead one had not taken is gone.
        """
        self._out[end].clear()
        return Ticket(self._segment.way_in(), self._segment.token, self._num_ends, end)

    def ring(self) -> None:
        """Wake who waits in `wait`, as if an end had sent something. Any thread may call this."""
        self._bell.ring()

    def all_opened(self) -> None:
        """The file needs no name any more."""
        self._segment.unlink()

    def has_room(self, end: int, messages: int) -> bool:
        """Whether so many messages can be put now."""
        return self._out[end].has_room(messages)

    def put(self, end: int, message: bytes) -> bool:
        """Send to an end; False where the message is too large, or too many wait there."""
        if not self._out[end].put(message):
            return False
        self._bells[end].ring()
        return True

    def flush(self) -> None:
        """Nothing: what was put is there."""

    def peek(self, end: int) -> bytes | None:
        """The oldest message of an end, which stays until `drop`."""
        return self._in[end].peek()

    def drop(self, end: int) -> None:
        """The oldest message of an end has been dealt with."""
        self._in[end].drop()

    def lives(self, end: int) -> bool:
        """Whether the process of an end has it open."""
        return self._segment.holds(1 + end)

    def count(self) -> int:
        """Of messages announced so far: take it before looking for one, and give it to `wait`."""
        return self._sleeper.count()

    def wait(self, seen: int, seconds: float) -> None:
        """Return once an end has sent something since `seen`, after `seconds` or less."""
        self._sleeper.wait(seen, seconds)

    def close(self) -> None:
        """Let go of the memory: for the ends, the hub is gone. May be called twice."""
        self._segment.unlink()
        self._segment.close()


@final
class ChannelEnd:
    """A process around the hub. Made by :meth:`open`.

    Args:
        segment: The memory, which belongs to this end from now on.
        ticket: What it was opened with.
    """

    def __init__(self, segment: Segment, ticket: Ticket) -> None:
        self._segment = segment
        layout, end = ChannelLayout(ticket.num_ends), ticket.end
        self._in = Ring(segment.address + layout.ring(end, inward=False))
        self._out = Ring(segment.address + layout.ring(end, inward=True))
        self._hub_bell = Bell(segment.address + layout.bell(0))
        self._sleeper = Sleeper(Bell(segment.address + layout.bell(1 + end)), ticket.num_ends)

    @classmethod
    def open(cls, ticket: Ticket) -> Self:
        """This process's end.

        Raises:
            OSError: The memory is not there: on another host, say.
        """
        segment = Segment.open(ticket.name, ChannelLayout(ticket.num_ends).size, ticket.token)
        segment.hold(1 + ticket.end)
        return cls(segment, ticket)

    def take(self) -> bytes | None:
        """The hub's next message. Blocks until there is one; None once the hub is gone."""
        while True:
            seen = self._sleeper.count()
            message = self._in.peek()
            if message is not None:
                self._in.drop()
                return message
            if not self._segment.holds(0):
                return None
            self._sleeper.wait(seen, LOOK_S)

    def peek(self) -> bytes | None:
        """The message that `take` would give at once; None where it would wait."""
        return self._in.peek()

    def put(self, message: bytes) -> bool:
        """Send to the hub; False where the message is too large, or too many wait there."""
        if not self._out.put(message):
            return False
        self._hub_bell.ring()
        return True

    def close(self) -> None:
        """Let go of the memory: for the hub, this end is gone. May be called twice."""
        self._segment.close()
