"""Parameter servers in actors of a local Ray: requests, deaths, statistics."""

from __future__ import annotations

import os
import platform
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import ray
import torch

import raydist as rd
from raydist.actors.parameter_servers import RayConnection, ServerActors
from raydist.actors.version_check import Software
from raydist.cluster.nodes import place, release
from raydist.parameter_servers.connection import ServerConnection
from raydist.parameter_servers.requests import Assign, CreateSlices, Pull, Push, PushKey, Sender, Statistics
from raydist.parameter_servers.server import ParameterServer
from tests.contracts.server_connection import ServerConnectionContract, ask
from tests.parameter_servers.examples import slice_of

pytestmark = pytest.mark.usefixtures("ray_cluster")

START_S = 60.0
OTHER = Software((("raydist", "0.1"), ("Python", platform.python_version()), ("torch", torch.__version__)))


def real_server(number: int, num_servers: int) -> ParameterServer:
    return ParameterServer(number, num_servers, "async")


@pytest.fixture(scope="module")
def actors(ray_cluster: None) -> Iterator[ServerActors]:
    with some_actors(2, "tried") as made:
        yield made


@contextmanager
def some_actors(count: int, name: str) -> Iterator[ServerActors]:
    reservation = place([{"CPU": 0.01}] * count, strategy="PACK", timeout_s=START_S)
    made = ServerActors(reservation, ["here"] * count, name=name, resources={"CPU": 0.01}, num_workers=4, limit_s=20.0)
    try:
        yield made
    finally:
        made.kill()
        made.kill()
        release(reservation)


class TestRayConnection(ServerConnectionContract):
    actors: ServerActors

    @pytest.fixture(autouse=True)
    def use(self, actors: ServerActors) -> None:
        self.actors = actors

    @contextmanager
    def connections(self, count: int) -> Iterator[list[ServerConnection]]:
        handle = self.actors._handles[0]
        make = handle.start.remote("parameter server 0", "tried", ParameterServer, 0, 1, rd.SyncWithBackups(0))
        ray.get(make, timeout=START_S)
        yield [RayConnection(handle, "parameter server 0", 20.0) for _ in range(count)]


def test_no_read_is_torn_and_reads_are_counted(actors: ServerActors) -> None:
    extent, reads = 30_000, 100
    pids = actors.start(real_server, 2, within_s=START_S)
    assert len(set(pids)) == 2
    connection = actors.connections[1]
    parts = tuple(slice_of(number, extent, server=1) for number in (1, 2))
    ask(connection, CreateSlices(parts), *[torch.ones(extent).double()] * 2)
    done = threading.Event()

    def push() -> None:
        index = 0
        while not done.is_set():
            version = index + 2
            values = torch.full((extent,), float(version)).double()
            request = Assign(Sender(0, 0), PushKey(0, index), (1, 2), (False, False))
            connection.ask(request, [values, values]).answer(20.0)
            index += 1

    pusher = threading.Thread(target=push)
    pusher.start()
    try:
        last = 0
        for _ in range(reads):
            answer, values = connection.ask(Pull((1, 2)), answer_bytes=2 * extent * 8).answer(20.0)
            version = answer.version
            assert all(bool((value == version).all()) for value in values), "torn"
            assert version >= last
            last = version
        assert last > 10
    finally:
        done.set()
        pusher.join(20)
    stats = ask(connection, Statistics())[0].value
    assert stats.pulls == reads
    assert stats.bytes_pulled == reads * 2 * extent * 8
    assert stats.pushes > 10


def test_a_server_that_dies_is_named_in_time() -> None:
    with some_actors(1, "doomed") as mine:
        (pid,) = mine.start(real_server, 1, within_s=START_S)
        (connection,) = mine.connections
        ask(connection, CreateSlices((slice_of(1, 2),)), torch.ones(2).double())
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(rd.UnavailableError, match=r"parameter server 0 of doomed on here is gone.*checkpoint"):
            ask(connection, Statistics())
        assert time.monotonic() - began < 10
        with pytest.raises(rd.UnavailableError, match="is gone"):
            ask(connection, Push(Sender(0, 0), PushKey(0, 0), 0, (), ()))


def test_a_server_that_cannot_start_says_why(actors: ServerActors, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="consistency must be"):
        actors.start(odd_server, within_s=START_S)
    monkeypatch.setattr("raydist.actors.parameter_servers.installed_software", lambda: OTHER)
    with pytest.raises(rd.FailedPreconditionError, match=r"server 0 of tried on here has raydist .*, not 0\.1"):
        actors.start(odd_server, within_s=START_S)


def odd_server(number: int) -> ParameterServer:
    return ParameterServer(number, 1, "eventual")  # type: ignore[arg-type]
