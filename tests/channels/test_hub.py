from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

import pytest

from raydist.channels.hub import ChannelEnd, ChannelHub, Ticket
from raydist.channels.layout import MESSAGE_BYTES, MESSAGES_UNDER_WAY
from tests.fork_server import fork_server


def echo(ticket: Ticket) -> None:
    end = ChannelEnd.open(ticket)
    while (message := end.take()) not in (None, b"end"):
        assert end.put(bytes([ticket.end]) + (message or b""))


@pytest.fixture
def hub() -> Iterator[ChannelHub]:
    made = ChannelHub.open(2)
    yield made
    made.close()


def answer(hub: ChannelHub, end: int, within_s: float = 10.0) -> bytes | None:
    limit = time.monotonic() + within_s
    while time.monotonic() < limit:
        seen = hub.count()
        message = hub.peek(end)
        if message is not None:
            hub.drop(end)
            return message
        if not hub.lives(end):
            return hub.peek(end)
        hub.wait(seen, limit - time.monotonic())
    return None


def processes(hub: ChannelHub) -> list[BaseProcess]:
    context = fork_server()
    started: list[BaseProcess] = [
        context.Process(target=echo, args=(hub.ticket(end),), daemon=True) for end in range(2)
    ]
    for process in started:
        process.start()
    limit = time.monotonic() + 50
    while not all(hub.lives(end) for end in range(2)) and time.monotonic() < limit:
        time.sleep(0.01)
    hub.all_opened()
    return started


def test_every_message_is_answered_by_its_end(hub: ChannelHub) -> None:
    started = processes(hub)
    for number in range(200):
        message = number.to_bytes(2, "little")
        for end in range(2):
            assert hub.put(end, message)
        for end in (1, 0):
            assert answer(hub, end) == bytes([end]) + message
    for end in range(2):
        hub.put(end, b"end")
    for process in started:
        process.join(10)
        assert process.exitcode == 0


def test_a_dead_end_is_seen_and_its_last_words_are_not_lost(hub: ChannelHub) -> None:
    started = processes(hub)
    hub.put(0, b"last")
    assert answer(hub, 0) == b"\x00last"
    os.kill(started[0].pid or 0, signal.SIGKILL)
    started[0].join(10)
    assert not hub.lives(0)
    assert answer(hub, 0) is None
    hub.put(1, b"you")
    assert answer(hub, 1) == b"\x01you"
    os.kill(started[1].pid or 0, signal.SIGKILL)
    started[1].join(10)


def test_ends_notice_that_the_hub_is_gone() -> None:
    hub = ChannelHub.open(1)
    end = ChannelEnd.open(hub.ticket(0))
    threading.Timer(0.05, hub.close).start()
    assert end.take() is None
    end.close()


def test_a_wait_ends_in_time(hub: ChannelHub) -> None:
    seen = hub.count()
    hub.wait(seen, 0.0)
    assert hub.peek(0) is None


def test_what_is_too_large_is_refused_on_both_sides(hub: ChannelHub) -> None:
    end = ChannelEnd.open(hub.ticket(0))
    assert not hub.put(0, bytes(MESSAGE_BYTES + 1))
    assert not end.put(bytes(MESSAGE_BYTES + 1))
    assert hub.put(0, b"small")
    assert hub.has_room(0, MESSAGES_UNDER_WAY - 1)
    assert not hub.has_room(0, MESSAGES_UNDER_WAY)
    assert end.take() == b"small"
    end.close()


def test_a_closed_hub_leaves_no_file() -> None:
    hub = ChannelHub.open(1)
    ticket = hub.ticket(0)
    hub.close()
    with pytest.raises(OSError, match="No such file"):
        ChannelEnd.open(ticket)


def test_another_end_takes_the_place_of_a_dead_one_without_what_that_had_not_taken(hub: ChannelHub) -> None:
    first = ChannelEnd.open(hub.ticket(0))
    hub.all_opened()
    hub.put(0, b"taken")
    hub.put(0, b"never taken")
    assert first.take() == b"taken"
    assert first.put(b"last words")
    first.close()
    assert not hub.lives(0)
    second = ChannelEnd.open(hub.late_ticket(0))
    assert hub.lives(0)
    assert second.peek() is None
    hub.put(0, b"new")
    assert second.peek() == second.take() == b"new"
    assert second.put(b"answer")
    assert [answer(hub, 0), answer(hub, 0)] == [b"last words", b"answer"]
    second.close()


def test_who_waits_at_the_hub_can_be_woken_by_a_thread_of_its_own(hub: ChannelHub) -> None:
    seen = hub.count()
    hub.ring()
    assert hub.count() != seen
