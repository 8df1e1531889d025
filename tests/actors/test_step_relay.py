from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.actors import step_relay
from raydist.actors.step_head import DONE, HEAD, KEPT, LEAVE, STEPS
from raydist.actors.step_relay import Relayed, StepRelay
from raydist.channels.hub import ChannelEnd, ChannelHub
from tests.collectives.wired_ranks import await_true

LIMIT_S = 20.0


def message(kind: int, number: int, body: bytes = b"") -> bytes:
    return HEAD.pack(kind, number) + body


class Host:
    """A relay with its ends, which a test makes answer."""

    def __init__(self, num_ends: int) -> None:
        hub = ChannelHub.open(num_ends)
        self.ends = [ChannelEnd.open(hub.ticket(end)) for end in range(num_ends)]
        hub.all_opened()
        self.relay = StepRelay(hub)
        self.calls = ThreadPoolExecutor(8)

    def carry(self, number: int, *messages: tuple[int, bytes]) -> Future[Relayed]:
        return self.calls.submit(self.relay.carry, number, messages)

    def answer(self, end: int, kind: int = DONE) -> bytes:
        """Have an end answer its oldest message, which is returned."""
        taken = self.ends[end].take()
        assert taken is not None
        assert self.ends[end].put(bytes([kind]) + taken[1:])
        return taken

    def close(self) -> None:
        for end in self.ends:
            end.close()
        self.calls.shutdown()
        self.relay.close()


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host(2)
    yield made
    made.close()


def test_a_call_ends_when_all_that_it_carried_is_answered(host: Host) -> None:
    call = host.carry(1, (0, message(STEPS, 1, b"a")), (1, message(STEPS, 2, b"b")))
    assert host.answer(0) == message(STEPS, 1, b"a")
    time.sleep(0.05)
    assert not call.done()
    host.answer(1)
    carried = call.result(LIMIT_S)
    assert sorted(carried.messages) == [(0, message(DONE, 1, b"a")), (1, message(DONE, 2, b"b"))]
    assert (carried.place, carried.num_missing, carried.gone) == (0, 0, ())


def test_the_word_to_leave_is_not_answered(host: Host) -> None:
    assert host.carry(1, (0, message(LEAVE, 1))).result(LIMIT_S) == Relayed(0, (), 0, ())
    assert host.ends[0].take() == message(LEAVE, 1)


@given(st.permutations(range(1, 7)))
def test_messages_go_out_in_the_order_of_their_calls_numbers(order: list[int]) -> None:
    host = Host(1)
    try:
        calls = [host.carry(number, (0, message(STEPS, number))) for number in order]
        assert [host.answer(0) for _ in order] == [message(STEPS, number) for number in range(1, 7)]
        carried = sorted((call.result(LIMIT_S) for call in calls), key=lambda one: one.place)
        assert [one.place for one in carried] == list(range(6))
        assert [sent for one in carried for sent in one.messages] == [(0, message(DONE, n)) for n in range(1, 7)]
    finally:
        host.close()


def test_a_number_that_never_comes_is_not_waited_for_long(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_relay, "_LOST_S", 0.05)
    call = host.carry(2, (0, message(STEPS, 1)))
    host.answer(0)
    assert len(call.result(LIMIT_S).messages) == 1


def test_an_answer_that_is_to_be_asked_for_ends_all_calls_and_the_rest_is_collected(host: Host) -> None:
    """The others may wait for who has failed: the driver is to tell them."""
    first = host.carry(1, (0, message(STEPS, 1)), (1, message(STEPS, 2)))
    second = host.carry(2, (0, message(STEPS, 3)), (1, message(STEPS, 4)))
    await_true(lambda: len(host.relay._missing) == 4)  # else the first call may end before the second has begun
    host.answer(0, KEPT)
    early = [first.result(LIMIT_S), second.result(LIMIT_S)]
    assert [sent for one in early for sent in one.messages] == [(0, message(KEPT, 1))]
    assert [one.num_missing for one in early] == [3, 3]
    collected = host.calls.submit(host.relay.collect)
    host.answer(1)
    assert collected.result(LIMIT_S) == Relayed(2, ((1, message(DONE, 2)),), 2, ())
    host.answer(0)
    host.answer(1)
    rest = [host.relay.collect(), host.relay.collect()]
    assert sorted(sent for one in rest for sent in one.messages) == [(0, message(DONE, 3)), (1, message(DONE, 4))]
    assert rest[-1].num_missing == 0


def test_nothing_is_collected_for_long(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_relay, "_COLLECT_S", 0.05)
    call = host.carry(1, (0, message(STEPS, 1)))
    assert host.relay.collect() == Relayed(0, (), 1, ())
    host.answer(0)
    assert call.result(LIMIT_S).num_missing == 0


def test_who_is_gone_is_named_with_its_last_words(host: Host) -> None:
    call = host.carry(1, (0, message(STEPS, 1)), (0, message(STEPS, 2)), (1, message(STEPS, 3)))
    host.answer(0)
    host.ends[0].close()  # as the kernel does for a process that dies
    carried = call.result(LIMIT_S)
    assert (carried.messages, carried.num_missing, carried.gone) == (((0, message(DONE, 1)),), 1, (0,))
    host.answer(1)
    assert host.relay.collect().messages == ((1, message(DONE, 3)),)
