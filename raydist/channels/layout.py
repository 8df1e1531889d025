"""Where everything lies in the memory that a hub shares with its ends. Only arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

__all__ = ["MESSAGES_UNDER_WAY", "MESSAGE_BYTES", "ChannelLayout"]

MESSAGES_UNDER_WAY = 8
"""Messages that may be on their way in one direction: as many groups of steps as are ever sent ahead, and some more."""
MESSAGE_BYTES = 32 << 10
"""The largest message: what is larger has better ways."""

_LINE = 64
_PAGE = 4096
_SLOT_STRIDE = MESSAGE_BYTES + _LINE
_RING_BYTES = 2 * _LINE + MESSAGES_UNDER_WAY * _SLOT_STRIDE


@final
@dataclass(frozen=True, slots=True)
class ChannelLayout:
    """Offsets in bytes: a page of proof, a bell for each member, then two rings for each end.

    Member 0 is the hub, member 1 + i is end i.

    Attributes:
        num_ends: Ends of the hub.
    """

    num_ends: int

    @property
    def size(self) -> int:
        """All of it."""
        return self.ring(self.num_ends, inward=False)

    @staticmethod
    def bell(member: int) -> int:
        """The counter that is rung when there is something for this member."""
        return _PAGE + member * _LINE

    def ring(self, end: int, *, inward: bool) -> int:
        """The messages from the hub to an end, or `inward` from it to the hub."""
        first = _PAGE * (1 + -(-(1 + self.num_ends) * _LINE // _PAGE))
        return first + (2 * end + inward) * _RING_BYTES

    @staticmethod
    def slot(number: int) -> int:
        """A message's place in its ring: its length, then its bytes."""
        return 2 * _LINE + number % MESSAGES_UNDER_WAY * _SLOT_STRIDE

    @staticmethod
    def taken() -> int:
        """The reader's counter in a ring; the writer's is at its beginning, on another cache line."""
        return _LINE
