"""Offsets in the memory that a channel's hub shares with its ends. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

__all__ = ["MESSAGES_UNDER_WAY", "MESSAGE_BYTES", "ChannelLayout"]

MESSAGES_UNDER_WAY = 8
"""Capacity of a ring in messages: more than the largest number of step groups that are sent ahead."""
MESSAGE_BYTES = 32 << 10
"""The largest message in bytes; larger data is sent by other means."""

_LINE = 64
_PAGE = 4096
_SLOT_STRIDE = MESSAGE_BYTES + _LINE
_RING_BYTES = 2 * _LINE + MESSAGES_UNDER_WAY * _SLOT_STRIDE


@final
@dataclass(frozen=True, slots=True)
class ChannelLayout:
    """Offsets in bytes: a page with the segment's token, a futex for each member, then two rings for each end.

    Member 0 is the hub, member 1 + i is end i.

    Attributes:
        num_ends: Number of ends of the hub.
    """

    num_ends: int

    @property
    def size(self) -> int:
        """The total size in bytes."""
        return self.ring(self.num_ends, inward=False)

    @staticmethod
    def bell(member: int) -> int:
        """Return the offset of the futex that wakes this member."""
        return _PAGE + member * _LINE

    def ring(self, end: int, *, inward: bool) -> int:
        """Return the offset of the ring from the hub to an end, or (`inward`) from the end to the hub."""
        first = _PAGE * (1 + -(-(1 + self.num_ends) * _LINE // _PAGE))
        return first + (2 * end + inward) * _RING_BYTES

    @staticmethod
    def slot(number: int) -> int:
        """Return the offset of a message in its ring: the length, then the bytes."""
        return 2 * _LINE + number % MESSAGES_UNDER_WAY * _SLOT_STRIDE

    @staticmethod
    def taken() -> int:
        """Return the offset of the reader's counter in a ring; the writer's is at offset 0, on another cache line."""
        return _LINE
