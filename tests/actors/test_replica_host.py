"""The shell around a runner, called in this process; on a cluster it is run by `tests/strategies/test_mirrored.py`."""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from raydist.actors.main_thread_rest import MainThreadRest
from raydist.actors.replica_host import CrowdedHost, ReplicaHost
from raydist.actors.step_channel import StepChannel
from raydist.actors.supervision import RemoteFailure
from raydist.channels.hub import ChannelHub, Ticket
from raydist.errors import RaydistError, UnavailableError


@dataclass(frozen=True)
class Answer:
    results: tuple[Any, ...]
    error: BaseException | None = None

    def packed(self) -> bytes | None:
        return None if self.error is not None else pickle.dumps(self.results)


class Runner:
    """Answers what it was asked."""

    def __init__(self, name: str) -> None:
        self.name = name

    def steps(self, group: Any, objects: tuple[Any, ...]) -> Answer:
        if isinstance(group, BaseException):
            return Answer((self.name,), group)
        return Answer((self.name, group, objects))

    def read_ahead(self, message: bytes) -> None:
        pass

    def run_message(self, message: bytes, said: Any, more_wait: Callable[[], bool]) -> Answer:
        if message == b"broken":
            raise RuntimeError("not a step's error\nbut the runner's")
        return Answer((message,), ValueError("mine") if message == b"bad" else None)

    def ping(self, value: int) -> int:
        return value


def test_passes_calls_on_to_its_runner() -> None:
    host = ReplicaHost()
    assert host.start(Runner, "first") == os.getpid()
    assert host.steps("group", "a", "b").results == ("first", "group", ("a", "b"))
    assert host.call("ping", 3) == 3
    assert host.control("ping", 4) == 4


@pytest.mark.parametrize("relays", [False, True])
def test_main_threads_rest_while_steps_are_on_their_way(relays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay's, while those are that it passes on: Ray's calls bring it others as soon as one of these has ended."""
    rests: list[str] = []

    @contextlib.contextmanager
    def while_busy(self: MainThreadRest) -> Iterator[None]:
        rests.append("begun")
        yield
        rests.append("ended")

    monkeypatch.setattr(MainThreadRest, "while_busy", while_busy)
    host = ReplicaHost()
    host.start(Runner, "first")
    if relays:
        host.open_relay(1)
        host.begin_relay()
        carry: Any = host.carry  # which Ray's types take for that of a handle
        assert carry(1, []).messages == ()
        assert rests == ["begun", "ended"]
    host.steps("group")
    assert rests == ["begun", "ended"]


def test_who_trains_updates_parameters_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    ReplicaHost()
    kernel, taken = torch._fused_sgd_, []

    def noted(*args: Any, **how: Any) -> None:
        taken.append(how["momentum"])
        kernel(*args, **how)

    monkeypatch.setattr(torch, "_fused_sgd_", noted)
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    torch.optim.SGD([parameter], lr=0.5, momentum=0.9).step()
    assert taken == [0.9]
    assert parameter.tolist() == [0.5, 0.5, 0.5]


def test_several_runners_of_one_process_have_a_place_each() -> None:
    host = CrowdedHost(2, {})
    assert [host.start(place, Runner, name) for place, name in enumerate(("first", "second"))] == [os.getpid()] * 2
    assert host.steps(1, "group", "a").results == ("second", "group", ("a",))
    assert host.steps(0, "group").results == ("first", "group", ())
    assert host.call(1, "ping", 3) == 3
    assert host.control(0, "ping", 4) == 4
    assert host.about(1) == ReplicaHost().about()


@pytest.mark.parametrize(
    ("error", "restored"), [(KeyError("mine"), KeyError), (KeyboardInterrupt("mine"), RaydistError)]
)
def test_errors_leave_as_values_whatever_their_class(error: BaseException, restored: type[Exception]) -> None:
    host = ReplicaHost()
    host.start(Runner, "first")
    with pytest.raises(RemoteFailure) as failure:
        host.steps(error)
    assert failure.value.before == Answer(("first",))
    arrived = failure.value.portable.restore()
    assert type(arrived) is restored
    assert "mine" in str(arrived)


def test_variables_are_set_before_anything_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYDIST_TEST_VARIABLE", "before")
    ReplicaHost({"RAYDIST_TEST_VARIABLE": "3"})
    assert os.environ["RAYDIST_TEST_VARIABLE"] == "3"


def test_steps_come_through_a_channel_and_errors_are_kept_until_they_are_asked_for() -> None:
    host = ReplicaHost()
    host.start(Runner, "first")
    hub = ChannelHub.open(1)
    assert host.open_channel(hub.ticket(0))
    hub.all_opened()
    serving: list[threading.Thread] = []

    def serve(rank: int, turn: int) -> None:
        serving.append(threading.Thread(target=host.serve, args=(turn,)))
        serving[-1].start()

    channel = StepChannel(hub, 1, serve=serve, fetch=lambda rank, number: number)
    good, bad = (channel.send([message]) or [] for message in (b"good", b"bad"))
    assert channel.wait([*good, *bad], 20)
    assert good[0].value == (b"good",)
    serving[0].join(20)
    with pytest.raises(RemoteFailure) as failure:
        host.take_result(bad[0].ref)
    assert failure.value.before == Answer((b"bad",))
    assert isinstance(failure.value.portable.restore(), ValueError)
    channel.close()


def test_who_fails_while_it_serves_is_seen_to_be_gone_and_says_why() -> None:
    host = ReplicaHost()
    host.start(Runner, "first")
    hub = ChannelHub.open(1)
    assert host.open_channel(hub.ticket(0))
    hub.all_opened()
    failures: list[Exception] = []
    serving: list[threading.Thread] = []

    def serve(rank: int, turn: int) -> None:
        def served() -> None:
            try:
                host.serve(turn)
            except RuntimeError as error:
                failures.append(error)

        serving.append(threading.Thread(target=served))
        serving[-1].start()

    channel = StepChannel(hub, 1, serve=serve, fetch=lambda rank, number: number)
    (lost,) = channel.send([b"broken"]) or []
    assert channel.wait([lost], 20)
    serving[0].join(20)
    assert channel.send([b"good"]) is None  # by Ray from now on
    with pytest.raises(RemoteFailure) as failure:
        host.take_result(lost.ref)
    told = failure.value.portable.restore()
    assert isinstance(told, UnavailableError)
    assert "failed while it served steps (RuntimeError: not a step's error)" in str(told)
    assert len(failures) == 1
    host.serve(2)  # returns at once
    channel.close()


def test_memory_that_is_not_there_is_no_channel() -> None:
    host = ReplicaHost()
    assert not host.open_channel(Ticket("raydist-shm-of-nobody", b"", 1, 0))
    host.serve(1)  # returns at once


@pytest.mark.parametrize(("num_neighbours", "behind"), [(1, 0), (100_000, 1)])
def test_threads_of_ray_go_behind_in_a_crowd_whose_steps_they_do_not_bring(
    num_neighbours: int, behind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[None] = []
    monkeypatch.setattr("raydist.actors.replica_host.put_behind", lambda: asked.append(None))
    monkeypatch.setattr("raydist.actors.replica_host.MainThreadRest", lambda num_neighbours: None)  # it takes a signal
    host = ReplicaHost(num_neighbours=num_neighbours)
    assert not host.open_channel(Ticket("raydist-shm-of-nobody", b"", 1, 0))
    assert asked == []
    hub = ChannelHub.open(1)
    try:
        assert host.open_channel(hub.ticket(0))
    finally:
        hub.close()
    assert len(asked) == behind


def test_a_relay_passes_steps_on_to_the_replicas_of_its_host() -> None:
    hosts: list[Any] = [ReplicaHost(), ReplicaHost()]  # Ray's decorator has calls in this process look like none
    tickets = hosts[1].open_relay(2)
    for host, ticket in zip(hosts, tickets, strict=True):
        host.start(Runner, "name")
        assert host.open_channel(ticket)
    hosts[1].begin_relay()
    serving = [threading.Thread(target=host.serve, args=(1,)) for host in hosts]
    for thread in serving:
        thread.start()
    steps, leave = struct.Struct("<BQ").pack(0, 7), struct.Struct("<BQ").pack(1, 1)
    carried = hosts[1].carry(1, [(0, steps + b"good"), (1, steps + b"good")])
    assert [pickle.loads(message[len(steps) :]) for _, message in carried.messages] == [(b"good",)] * 2
    hosts[1].carry(2, [(0, leave), (1, leave)])
    for thread in serving:
        thread.join(20)
        assert not thread.is_alive()


def test_what_was_to_be_passed_on_by_who_is_gone_is_lost() -> None:
    with pytest.raises(RemoteFailure) as failure:
        ReplicaHost().take_result(3)
    assert isinstance(failure.value.portable.restore(), UnavailableError)


def test_who_is_no_relay_says_so() -> None:
    host: Any = ReplicaHost()
    with pytest.raises(UnavailableError, match="must be begun before"):
        host.collect()
