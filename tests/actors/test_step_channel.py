"""Both ends in one process: what a replica's actor would be asked is a list here, and its loop a thread.

What Ray would carry to relays, threads do.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from raydist.actors.relayed_hub import RelayedHub
from raydist.actors.step_channel import Answer, StepChannel, StepHub
from raydist.actors.step_relay import StepRelay
from raydist.actors.step_server import StepServer
from raydist.channels.hub import ChannelEnd, ChannelHub
from raydist.channels.layout import MESSAGE_BYTES, MESSAGES_UNDER_WAY


class Result:
    """What a step gave: plain bytes, or something that must travel another way."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def packed(self) -> bytes | None:
        return None if self.value == b"odd" else pickle.dumps(self.value)


class Runner:
    """Has a function run what comes."""

    def __init__(self, run: Callable[[bytes], Result]) -> None:
        self.run = run

    def read_ahead(self, message: bytes) -> None:
        raise AssertionError("nobody waits here")

    def run_message(self, message: bytes, said: None, more_wait: Callable[[], bool]) -> Result:
        return self.run(message)


class Replicas:
    """Actors that do one call after the other, in a thread each."""

    def __init__(self, hosts: Sequence[int] | None, count: int) -> None:
        hubs = [ChannelHub.open(num_ends) for num_ends in hosts or [count]]
        self.ends = [
            ChannelEnd.open(hub.ticket(end)) for hub, n in zip(hubs, hosts or [count], strict=True) for end in range(n)
        ]
        for hub in hubs:
            hub.all_opened()
        self._relays = [StepRelay(hub) for hub in hubs]
        self._calls = ThreadPoolExecutor(16)
        self.hub: StepHub = hubs[0] if hosts is None else self.relayed(hosts)
        self.done: list[list[Any]] = [[] for _ in range(count)]
        self.turns: list[list[int]] = [[] for _ in range(count)]
        self.kept: list[dict[int, Any]] = [{} for _ in range(count)]
        self.gate = threading.Event()
        self.gate.set()
        self._threads: list[threading.Thread] = []
        self._last: list[threading.Thread | None] = [None] * count
        self.channel = StepChannel(self.hub, count, serve=self.serve, fetch=self.fetch)

    def relayed(self, hosts: Sequence[int]) -> RelayedHub:
        """A hub whose ends are on so many hosts, with so many on each."""
        ranks = iter(range(sum(hosts)))
        return RelayedHub(
            [list(itertools.islice(ranks, num_ends)) for num_ends in hosts],
            carry=lambda host, number, messages: self._calls.submit(self._relays[host].carry, number, messages),
            collect=lambda host: self._calls.submit(self._relays[host].collect),
        )

    def serve(self, rank: int, turn: int) -> None:
        self.turns[rank].append(turn)
        self.ask(rank, lambda: self._serve(rank, turn))

    def _serve(self, rank: int, turn: int) -> None:
        with contextlib.suppress(OSError):  # a test has closed the end: its process is dead
            runner = Runner(partial(self._run, rank))
            StepServer(self.ends[rank], runner, self._keep(rank), reads_ahead=False).serve(turn)

    def fetch(self, rank: int, number: int) -> tuple[str, int]:
        self.ask(rank, lambda: self.done[rank].append(("fetched", self.kept[rank].pop(number, None))))
        return ("ref", number)

    def ask(self, rank: int, call: Any) -> None:
        """As Ray does: one call after the other."""
        before = self._last[rank]

        def run() -> None:
            if before is not None:
                before.join()
            call()

        thread = threading.Thread(target=run, daemon=True)
        self._last[rank] = thread
        self._threads.append(thread)
        thread.start()

    def _run(self, rank: int, message: bytes) -> Result:
        self.gate.wait(20)
        self.done[rank].append(message)
        return Result(message)

    def _keep(self, rank: int) -> Any:
        return lambda number, result: self.kept[rank].__setitem__(number, result.value)

    def close(self) -> None:
        self.gate.set()
        self.channel.close()
        for relay in self._relays:  # as the end of their processes does
            relay.close()
        for thread in self._threads:
            thread.join(20)
        for end in self.ends:
            end.close()
        self._calls.shutdown()


@pytest.fixture(params=[None, [2], [1, 1]], ids=["memory", "one relay", "two relays"])
def replicas(request: pytest.FixtureRequest) -> Iterator[Replicas]:
    made = Replicas(request.param, 2)
    yield made
    made.close()


def sent(replicas: Replicas, *messages: bytes | None) -> list[Answer]:
    answers = replicas.channel.send(messages)
    assert answers is not None
    return answers


def wait(replicas: Replicas, answers: list[Answer]) -> list[Any]:
    assert replicas.channel.wait(answers, 20)
    return [answer.value for answer in answers]


def test_messages_are_answered_in_order_within_one_turn(replicas: Replicas) -> None:
    first, second = sent(replicas, b"a0", b"a1"), sent(replicas, b"b0", b"b1")
    assert wait(replicas, second) == [b"b0", b"b1"]
    assert wait(replicas, first) == [b"a0", b"a1"]
    assert replicas.turns == [[1], [1]]


def answered_unread(replicas: Replicas, count: int) -> list[Answer]:
    """Answers to so many messages, each sent when the one before was answered; the driver looks at none."""
    answers = []
    for number in range(count):
        answers += sent(replicas, b"a%d" % number, b"b%d" % number)
        end = time.monotonic() + 20
        while min(map(len, replicas.done)) <= number and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(0.02)  # until the answer is there, too
    return answers


def test_no_answer_is_lost_while_the_driver_reads_none(replicas: Replicas) -> None:
    """One that found no room could not be told of: the driver waited for it until its limit was over."""
    answers = answered_unread(replicas, 3 * MESSAGES_UNDER_WAY)
    assert len(wait(replicas, answers)) == 6 * MESSAGES_UNDER_WAY
    assert replicas.turns == [[1], [1]]


def test_answers_that_came_while_something_was_sent_are_news(replicas: Replicas) -> None:
    answers = answered_unread(replicas, MESSAGES_UNDER_WAY)
    replicas.gate.clear()
    sent(replicas, b"a", b"b")
    assert all(answer.settled for answer in answers)
    began = time.monotonic()
    replicas.channel.await_news(20)
    assert time.monotonic() - began < 10


def test_no_more_is_sent_than_there_is_room_for_answers(replicas: Replicas) -> None:
    replicas.gate.clear()
    answers: list[Answer] = []
    while (some := replicas.channel.send((b"a", b"b"))) is not None:
        answers += some
        time.sleep(0.05)  # the replicas take what they can
    assert len(answers) <= 2 * MESSAGES_UNDER_WAY
    replicas.gate.set()
    assert len(wait(replicas, answers)) == len(answers)


def test_what_is_asked_another_way_is_done_in_its_place(replicas: Replicas) -> None:
    for number in range(5):
        limit = time.monotonic() + 20
        while not all(replicas.hub.has_room(rank, 2) for rank in range(2)):  # a request to leave may still lie there
            assert time.monotonic() < limit
        answers = sent(replicas, b"%d" % number, b"%d" % number)
        for rank in range(2):
            replicas.channel.leave(rank)
            replicas.ask(rank, lambda rank=rank, number=number: replicas.done[rank].append(-number))
        replicas.channel.leave(0)  # once is enough, twice does no harm
        if number % 2:
            wait(replicas, answers)
    wait(replicas, sent(replicas, b"end", b"end"))
    expected = [step for number in range(5) for step in (b"%d" % number, -number)]
    assert replicas.done == [[*expected, b"end"]] * 2


def test_all_can_be_asked_another_way_at_once(replicas: Replicas) -> None:
    replicas.channel.send_to(0, b"a")
    replicas.channel.leave_all()  # also those who have not begun
    for rank in range(2):
        replicas.ask(rank, lambda rank=rank: replicas.done[rank].append("asked"))
    wait(replicas, sent(replicas, b"b", b"b"))
    assert replicas.done == [[b"a", "asked", b"b"], ["asked", b"b"]]
    assert replicas.turns == [[1, 2], [1]]


def test_a_turn_that_never_began_harms_no_other(replicas: Replicas) -> None:
    replicas.channel._begun[0] = 3  # as an interrupt leaves it that falls before the call
    replicas.channel.leave(0)
    assert wait(replicas, sent(replicas, b"x", b"y")) == [b"x", b"y"]
    assert replicas.turns == [[4], [1]]


def test_a_message_that_is_seen_twice_counts_once(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    first = sent(replicas, b"a", b"a")
    drop = replicas.hub.drop
    interrupted: list[int] = []

    def interrupt(rank: int) -> None:
        if not interrupted:
            interrupted.append(rank)
            raise KeyboardInterrupt
        drop(rank)

    monkeypatch.setattr(replicas.hub, "drop", interrupt)
    with pytest.raises(KeyboardInterrupt):
        replicas.channel.wait(first, 20)
    assert wait(replicas, sent(replicas, b"b", b"b")) == [b"b", b"b"]
    assert wait(replicas, first) == [b"a", b"a"]


def test_results_that_must_travel_another_way_are_asked_for(replicas: Replicas) -> None:
    first, second = sent(replicas, b"odd", b"plain"), sent(replicas, b"c", b"d")
    assert wait(replicas, first) == [None, b"plain"]
    assert first[0].ref == ("ref", first[0].number)
    assert wait(replicas, second) == [b"c", b"d"]
    replicas.channel.close()
    replicas._threads[-1].join(20)
    assert replicas.done[0] == [b"odd", b"c", ("fetched", b"odd")]


def test_after_such_a_result_messages_travel_another_way_for_a_while(replicas: Replicas) -> None:
    wait(replicas, sent(replicas, b"odd", b"odd"))
    refused = [replicas.channel.send([b"a", b"a"]) for _ in range(17)]
    assert None in refused
    assert refused[-1] is not None


@pytest.mark.parametrize("message", [None, bytes(MESSAGE_BYTES)])
def test_what_does_not_fit_is_sent_to_nobody(replicas: Replicas, message: bytes | None) -> None:
    assert replicas.channel.send([b"small", message]) is None
    assert wait(replicas, sent(replicas, b"a", b"b")) == [b"a", b"b"]
    assert replicas.done == [[b"a"], [b"b"]]


def test_there_is_always_room_to_ask_for_leave(replicas: Replicas) -> None:
    replicas.gate.clear()
    answers = []
    while (more := replicas.channel.send([b"x", b"x"])) is not None:
        answers += more
    replicas.channel.leave(0)
    replicas.channel.leave(1)
    replicas.gate.set()
    assert set(wait(replicas, answers)) == {b"x"}
    for thread in replicas._threads:
        thread.join(20)
        assert not thread.is_alive()


def test_a_wait_ends_in_time_and_when_enough_is_there(replicas: Replicas) -> None:
    replicas.gate.clear()
    answers = sent(replicas, b"x", b"x")
    began = time.monotonic()
    assert not replicas.channel.wait(answers, 0.05)
    assert time.monotonic() - began < 10
    assert replicas.channel.wait(answers, 0, enough=0)


def test_of_a_replica_that_is_gone_ray_is_asked(replicas: Replicas) -> None:
    wait(replicas, sent(replicas, b"x", b"x"))
    replicas.gate.clear()
    answers = sent(replicas, b"y", b"y")
    replicas.ends[1].close()  # as the kernel does for a process that dies
    assert replicas.channel.wait([answers[1]], 20)
    assert answers[1].ref == ("ref", answers[1].number)
    assert not answers[0].settled
    assert replicas.channel.send([b"z", b"z"]) is None


def test_who_lives_is_looked_at_now_and_then_alone(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    replicas.gate.clear()
    answers = sent(replicas, b"x", b"x")
    asked: list[int] = []

    def lives(end: int) -> bool:
        asked.append(end)
        return True

    monkeypatch.setattr(replicas.hub, "lives", lives)
    for _ in range(100):
        replicas.channel.wait(answers, 0)
    assert len(asked) < 50
    replicas.gate.set()
    assert wait(replicas, answers) == [b"x", b"x"]


def test_what_came_before_it_is_closed_can_be_read_after(replicas: Replicas) -> None:
    answers = sent(replicas, b"x", b"x")
    limit = time.monotonic() + 20
    while replicas.hub.peek(0) is None or replicas.hub.peek(1) is None:
        assert time.monotonic() < limit
    replicas.channel.close()
    assert wait(replicas, answers) == [b"x", b"x"]
    assert replicas.channel.send([b"x", b"x"]) is None


def test_one_replica_is_sent_to_by_itself_and_news_of_any_end_the_wait(replicas: Replicas) -> None:
    first = replicas.channel.send_to(1, b"one")
    second = replicas.channel.send_to(1, b"two")
    assert first is not None
    assert second is not None
    limit = time.monotonic() + 20
    while not second.settled and time.monotonic() < limit:
        replicas.channel.await_news(1.0)
    assert (first.value, second.value) == (b"one", b"two")
    assert replicas.turns == [[], [1]]
    assert replicas.channel.send_to(0, None) is None
    assert replicas.channel.send_to(0, b"x" * MESSAGE_BYTES) is None


def test_who_waits_for_news_can_be_woken(replicas: Replicas) -> None:
    timer = threading.Timer(0.1, replicas.channel.announce)
    timer.start()
    began = time.monotonic()
    while time.monotonic() - began < 0.1:
        replicas.channel.await_news(20.0)
    timer.join()
    assert time.monotonic() - began < 10
