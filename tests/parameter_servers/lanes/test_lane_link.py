from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest
import torch

import raydist as rd
from raydist.parameter_servers.desk import ServerDesk
from raydist.parameter_servers.lanes.hall import Hall
from raydist.parameter_servers.lanes.lane_link import LaneDoor, LaneLink
from raydist.parameter_servers.lanes.ticket import LaneTicket
from raydist.parameter_servers.link import ServerLink
from raydist.parameter_servers.requests import CreateSlices, Pull, Push, PushKey, Sender, Statistics
from tests.contracts.server_link import LIMIT_S, ServerLinkContract, ask
from tests.fork_server import fork_server
from tests.parameter_servers.plain_server import PlainServer
from tests.parameter_servers.served import slice_of


@contextmanager
def serving(server: PlainServer | None = None) -> Iterator[Hall]:
    """A hall with its thread in this process."""
    server = server or PlainServer()
    hall = Hall.open(ServerDesk(server), "parameter server 0")
    thread = threading.Thread(target=hall.serve)
    thread.start()
    try:
        yield hall
    finally:
        hall.stop()
        thread.join(10)
        server.close()
    assert not thread.is_alive()


def opened(hall: Hall) -> LaneLink:
    ticket = hall.open_lane()
    assert ticket is not None
    link = LaneDoor(ticket).open()
    assert isinstance(link, LaneLink)
    return link


class TestLaneLink(ServerLinkContract):
    @contextmanager
    def links(self, count: int) -> Iterator[list[ServerLink]]:
        with serving() as hall:
            made: list[ServerLink] = [opened(hall) for _ in range(count)]
            try:
                yield made
            finally:
                for link in made:
                    link.close()
                    link.close()


def test_values_are_read_without_asking() -> None:
    with serving() as hall:
        link = opened(hall)
        ask(link, CreateSlices((slice_of(1, 2),)), torch.zeros(2).double())
        target = torch.ones(2).double()
        for _ in range(5):
            link.ask(Pull((1,)), into={1: target}).answer(LIMIT_S)
        counts = ask(link, Statistics())[0].value
        assert target.tolist() == [0, 0]
        assert counts == {"CreateSlices": 1, "LocateSlices": 1, "Statistics": 1}
        link.close()


def test_a_hall_that_stops_is_gone_for_its_lanes() -> None:
    with serving() as hall:
        link = opened(hall)
    began = time.monotonic()
    with pytest.raises(rd.UnavailableError, match=r"parameter server 0 is gone.*checkpoint") as caught:
        ask(link, Statistics())
    assert caught.value.actor == "parameter server 0"
    assert time.monotonic() - began < 5
    link.close()


def test_a_lane_of_a_server_that_is_gone_does_not_open() -> None:
    with serving() as hall:
        ticket = hall.open_lane()
        assert ticket is not None
    elsewhere = LaneTicket("parameter server 0", "/proc/1/fd/99999", ticket.token, ticket.hall, ticket.hall_token)
    with pytest.raises(rd.UnavailableError, match=r"parameter server 0 must be open to workers of its host"):
        LaneLink.open(elsewhere)


# --- with processes ---------------------------------------------------------------------------------------------------


def serve(tickets: Connection, lanes: int) -> None:
    server = PlainServer()
    hall = Hall.open(ServerDesk(server), "parameter server 0")
    tickets.send([hall.open_lane() for _ in range(lanes)])
    hall.serve()


def push_for_ever(ticket: LaneTicket, worker: int, told: Connection) -> None:
    link = LaneLink.open(ticket)
    target = torch.zeros(5_000).double()
    for index in range(1 << 30):
        request = Push(Sender(worker, 0), PushKey(worker, index), 0, (1,), ("dense",), pull=(1,))
        link.ask(request, [torch.ones(5_000).double()], into={1: target}).answer(LIMIT_S)
        assert (target == target[0]).all()
        if index == 20:
            told.send("running")


def test_death_of_either_side_is_seen() -> None:
    context = fork_server()
    mine, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs, 2), daemon=True)
    server.start()
    assert mine.poll(50)
    first, second = mine.recv()
    assert first.name.startswith("/proc/"), "no file to be left behind by a killed process"
    link = LaneLink.open(first)
    ask(link, CreateSlices((slice_of(1, 5_000),)), torch.zeros(5_000).double())
    worker = context.Process(target=push_for_ever, args=(second, 1, theirs), daemon=True)
    worker.start()
    assert mine.poll(50)
    mine.recv()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(10)
    target = torch.zeros(5_000).double()
    link.ask(Pull((1,)), into={1: target}).answer(LIMIT_S)
    assert (target == target[0]).all()
    assert target[0] <= -20
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    server.join(10)
    with pytest.raises(rd.UnavailableError, match=r"parameter server 0 is gone"):
        ask(link, Statistics())
    link.close()


def test_what_was_not_waited_for_is_not_overwritten() -> None:
    server = PlainServer()
    with serving(server) as hall:
        link = opened(hall)
        ask(link, CreateSlices((slice_of(1, 50_000),)), torch.zeros(50_000).double())
        held = threading.Event()
        hall.submit(lambda desk: wait_for(held))
        for index in range(3):  # as where each wait is interrupted
            link.ask(Push(Sender(0, 0), PushKey(0, index), 0, (1,), ("dense",)), [torch.full((50_000,), 1.0).double()])
        link.ask(Push(Sender(0, 0), PushKey(0, 3), 0, (1,), ("dense",)), [torch.full((50_000,), 7.0).double()])
        held.set()
        deadline = time.monotonic() + LIMIT_S
        while server.counts.get("Push", 0) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert ask(link, Pull((1,)))[1][0].tolist() == [-10.0] * 50_000
        link.close()


def wait_for(event: threading.Event) -> None:
    assert event.wait(10)
