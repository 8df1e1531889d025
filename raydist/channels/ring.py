"""A ring buffer of messages from one process to another in shared memory."""

from __future__ import annotations

import ctypes
from typing import final

from raydist.channels.layout import MESSAGE_BYTES, MESSAGES_UNDER_WAY, ChannelLayout

__all__ = ["Ring"]


@final
class Ring:
    """A lock-free ring buffer for one writer and one reader. A message is complete once the writer raises the counter.

    Relies on x86-64, which keeps the order of stores and of loads.

    Args:
        address: Address of the ring's first byte, in memory that stays mapped.
    """

    def __init__(self, address: int) -> None:
        self._address = address
        self._written = ctypes.c_uint64.from_address(address)
        self._taken = ctypes.c_uint64.from_address(address + ChannelLayout.taken())

    def has_room(self, messages: int = 1) -> bool:
        """Return True if this many more messages fit (for the writer)."""
        return self._written.value - self._taken.value + messages <= MESSAGES_UNDER_WAY

    @property
    def is_empty(self) -> bool:
        """Return True if there is no message (for the reader)."""
        return self._written.value == self._taken.value

    def put(self, message: bytes) -> bool:
        """Add a message; return False if the message is too large or the ring is full. Does not block."""
        if len(message) > MESSAGE_BYTES or not self.has_room():
            return False
        number = self._written.value
        place = self._address + ChannelLayout.slot(number)
        ctypes.c_uint64.from_address(place).value = len(message)
        ctypes.memmove(place + 8, message, len(message))
        self._written.value = number + 1
        return True

    def peek(self) -> bytes | None:
        """Return the oldest message, None if the ring is empty. The message stays until `drop`."""
        if self.is_empty:
            return None
        place = self._address + ChannelLayout.slot(self._taken.value)
        return ctypes.string_at(place + 8, ctypes.c_uint64.from_address(place).value)

    def drop(self) -> None:
        """Remove the oldest message."""
        self._taken.value += 1

    def clear(self) -> None:
        """Remove all messages. For the writer, while there is no reader."""
        self._taken.value = self._written.value
