"""What a hub makes of what relays say; that it is one, tests/actors/test_step_channel.py shows."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from raydist.actors.relayed_hub import RelayedHub
from raydist.actors.step_channel import StepChannel
from raydist.actors.step_relay import Relayed


class Relays:
    """Notes what they are asked for: a test says what comes of it."""

    def __init__(self, *hosts: Sequence[int]) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.calls: list[Future[Relayed]] = []
        self.hub = RelayedHub(
            hosts,
            carry=lambda host, number, messages: self._ask("carry", host, number, list(messages)),
            collect=lambda host: self._ask("collect", host),
        )

    def _ask(self, *what: object) -> Future[Relayed]:
        self.asked.append(what)
        self.calls.append(Future())
        return self.calls[-1]


def test_all_replicas_of_a_host_share_a_call() -> None:
    relays = Relays([0, 2], [1])
    for rank, message in ((2, b"c"), (0, b"a"), (1, b"b")):
        assert relays.hub.put(rank, message)
    assert relays.asked == []
    relays.hub.flush()
    relays.hub.flush()
    relays.hub.put(2, b"d")
    relays.hub.flush()
    assert relays.asked == [
        ("carry", 0, 1, [(1, b"c"), (0, b"a")]),
        ("carry", 1, 1, [(0, b"b")]),
        ("carry", 0, 2, [(1, b"d")]),
    ]


def test_the_word_to_leave_goes_to_all_replicas_of_a_host_in_one_call() -> None:
    relays = Relays([0, 1], [2, 3])
    channel = StepChannel(relays.hub, 4, serve=lambda rank, turn: None, fetch=lambda rank, number: None)
    assert channel.send([b""] * 4) is not None
    channel.leave_all()
    assert [(what, host, number, len(messages)) for what, host, number, messages in relays.asked] == [
        ("carry", 0, 1, 2),
        ("carry", 1, 1, 2),
        ("carry", 0, 2, 2),
        ("carry", 1, 2, 2),
    ]


@given(st.permutations(range(4)))
def test_answers_count_in_the_order_in_which_they_were_given_whichever_call_ends_first(order: list[int]) -> None:
    relays = Relays([5])
    for _ in order:
        relays.hub.put(5, b"")
        relays.hub.flush()
    for place in order:
        relays.calls[place].set_result(Relayed(place, ((0, b"%d" % place),), 3 - place, ()))
    taken = []
    while (message := relays.hub.peek(5)) is not None:
        taken.append(message)
        relays.hub.drop(5)
    assert taken == [b"0", b"1", b"2", b"3"]


def test_who_waits_asks_for_what_no_call_will_bring() -> None:
    relays = Relays([0], [1])
    for rank in (0, 1):
        relays.hub.put(rank, b"")
    relays.hub.flush()
    relays.calls[0].set_result(Relayed(0, (), 1, ()))
    seen = relays.hub.count()
    relays.hub.wait(seen, 0.0)
    relays.hub.wait(seen, 0.0)
    assert relays.asked[2:] == [("collect", 0)]
    relays.calls[2].set_result(Relayed(1, (), 0, ()))
    relays.hub.wait(relays.hub.count(), 0.0)
    assert len(relays.asked) == 3


def test_replicas_that_a_relay_misses_are_gone_and_with_a_relay_all_of_its_host() -> None:
    relays = Relays([0, 1], [2, 3])
    for rank in (0, 2):
        relays.hub.put(rank, b"")
    relays.hub.flush()
    relays.calls[0].set_result(Relayed(0, (), 0, (1,)))
    relays.calls[1].set_exception(RuntimeError("died"))
    assert [relays.hub.lives(rank) for rank in range(4)] == [True, False, False, False]


def test_a_wait_ends_with_news_and_soon_without() -> None:
    """Who waits longer would see later that somebody has died."""
    relays = Relays([0])
    seen = relays.hub.count()
    began = time.monotonic()
    relays.hub.wait(seen, 600.0)
    assert time.monotonic() - began < 60.0
    relays.hub.ring()
    for _ in itertools.repeat(None, 100):
        relays.hub.wait(seen, 600.0)  # at once
    assert relays.hub.count() != seen


def test_who_takes_a_place_there_is_asked_by_ray_and_all_with_it() -> None:
    relays = Relays([0, 1])
    channel = StepChannel(relays.hub, 2, serve=lambda rank, turn: None, fetch=lambda rank, number: None)
    assert channel.send([b"", b""]) is not None
    assert channel.replace(1) is None
    assert channel.send([b"", b""]) is None
    assert channel.send_to(0, b"") is not None
