from __future__ import annotations

import ctypes
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from raydist.channels.layout import MESSAGE_BYTES, MESSAGES_UNDER_WAY, ChannelLayout
from raydist.channels.ring import Ring


def rings() -> tuple[Ring, Ring, object]:
    """A writer's and a reader's view of the same memory, and what keeps it."""
    memory = ctypes.create_string_buffer(ChannelLayout(1).size)
    address = ctypes.addressof(memory)
    return Ring(address), Ring(address), memory


@given(st.lists(st.one_of(st.none(), st.binary(max_size=50)), max_size=40))
def test_messages_come_in_order_and_once(actions: list[bytes | None]) -> None:
    writer, reader, memory = rings()
    waiting: deque[bytes] = deque()
    for message in actions:
        if message is None:
            assert reader.peek() == (waiting.popleft() if waiting else None)
            if not reader.is_empty:
                reader.drop()
        elif writer.put(message):
            waiting.append(message)
        else:
            assert len(waiting) == MESSAGES_UNDER_WAY
        assert writer.has_room() == (len(waiting) < MESSAGES_UNDER_WAY)
    del memory


def test_what_does_not_fit_is_not_sent() -> None:
    writer, reader, memory = rings()
    assert not writer.put(bytes(MESSAGE_BYTES + 1))
    assert reader.is_empty
    assert writer.put(bytes(MESSAGE_BYTES))
    assert reader.peek() == bytes(MESSAGE_BYTES)
    del memory


def test_a_message_stays_until_it_is_dropped() -> None:
    writer, reader, memory = rings()
    writer.put(b"a")
    assert reader.peek() == reader.peek() == b"a"
    reader.drop()
    assert reader.peek() is None
    del memory
