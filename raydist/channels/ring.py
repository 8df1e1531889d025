"""Messages from one process to another: a few slots of shared memory, filled and emptied in turn."""

from __future__ import annotations

import ctypes
from typing import final

from raydist.channels.layout import MESSAGE_BYTES, MESSAGES_UNDER_WAY, ChannelLayout

__all__ = ["Ring"]


@final
class Ring:
    """One writer, one reader; neither ever waits. Every message is there once its counter is raised.

    x86-64 keeps the order of stores and of loads, which is all that this needs.

    Args:
        address: Of its first byte, in memory that stays mapped.
    """

    def __init__(self, address: int) -> None:
        self._address = address
        self._written = ctypes.c_uint64.from_address(address)
        self._taken = ctypes.c_uint64.from_address(address + ChannelLayout.taken())

    def has_room(self, messages: int = 1) -> bool:
        """Whether so many more messages fit in (for the writer)."""
        return self._written.value - self._taken.value + messages <= MESSAGES_UNDER_WAY

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to take (for the reader)."""
        return self._written.value == self._taken.value

    def put(self, message: bytes) -> bool:
        """Add a message; False where it is too large, or there is no room."""
        if len(message) > MESSAGE_BYTES or not self.has_room():
            return False
        number = self._written.value
        place = self._address + ChannelLayout.slot(number)
        ctypes.c_uint64.from_address(place).value = len(message)
        ctypes.memmove(place + 8, message, len(message))
        self._written.value = number + 1
        return True

    def peek(self) -> bytes | None:
        """The oldest message, which stays until `drop`."""
        if self.is_empty:
            return None
        place = self._address + ChannelLayout.slot(self._taken.value)
        return ctypes.string_at(place + 8, ctypes.c_uint64.from_address(place).value)

    def drop(self) -> None:
        """The oldest message has been dealt with."""
        self._taken.value += 1

    def clear(self) -> None:
        """Drop everything: for the writer, while there is no reader."""
        self._taken.value = self._written.value
