"""Connections that are passed on, and torch's store behind them: it sees loopback alone."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import TCPStore

from raydist.collectives.rendezvous.store import RendezvousStore, connect_store
from raydist.collectives.rendezvous.store_relay import LOOPBACK, StoreRelay
from raydist.errors import DeadlineExceededError
from tests.forks import in_a_forked_child

ELSEWHERE = "127.0.0.2"
"""An address of this machine whose name no file tells."""


class Echo:
    """Sends back what it gets."""

    def __init__(self) -> None:
        self._listener = socket.create_server((LOOPBACK, 0))
        self.address = (LOOPBACK, int(self._listener.getsockname()[1]))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    @staticmethod
    def _answer(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5.0)


@pytest.fixture
def echo() -> Iterator[Echo]:
    made = Echo()
    yield made
    made.close()


def listener(host: str = LOOPBACK) -> socket.socket:
    return socket.create_server((host, 0))


def connected(relay: StoreRelay) -> socket.socket:
    return socket.create_connection((LOOPBACK, relay.port), timeout=10.0)


def said_back(connection: socket.socket, data: bytes) -> bytes:
    sender = threading.Thread(target=connection.sendall, args=(data,), daemon=True)
    sender.start()
    got = b""
    while len(got) < len(data):
        got += connection.recv(1 << 16)
    sender.join(10.0)
    return got


class Relays:
    """Those that a test starts: strategies that tests share may have their own in this process."""

    def __init__(self) -> None:
        self._of_others = set(self._all())

    def running(self) -> set[threading.Thread]:
        return self._all() - self._of_others

    def await_none(self) -> None:
        for thread in self.running():
            thread.join(10.0)
        assert not self.running()

    @staticmethod
    def _all() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "raydist-store-relay"}


@pytest.fixture
def relays() -> Relays:
    return Relays()


@settings(max_examples=10)
@given(messages=st.lists(st.binary(min_size=1, max_size=300_000), min_size=1, max_size=4))
def test_bytes_arrive_as_they_are_both_ways(messages: list[bytes]) -> None:
    echo = Echo()
    relay = StoreRelay(listener(), echo.address).start()
    try:
        with connected(relay) as one, connected(relay) as other:
            for message in messages:
                assert said_back(one, message) == message
                assert said_back(other, message[::-1]) == message[::-1]
    finally:
        relay.close()
        echo.close()


def test_closing_ends_the_connections_and_frees_the_port(echo: Echo, relays: Relays) -> None:
    relay = StoreRelay(listener(), echo.address).start()
    with connected(relay) as connection:
        assert said_back(connection, b"here") == b"here"
        relay.close()
        relay.close()
        assert connection.recv(1) == b""
    relays.await_none()
    with socket.create_server((LOOPBACK, relay.port)):
        pass


def test_the_end_of_one_side_is_the_end_of_the_other(echo: Echo) -> None:
    relay = StoreRelay(listener(), echo.address).start()
    with connected(relay) as connection:
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    relay.close()


def test_where_nobody_listens_the_connection_ends() -> None:
    with listener() as free:
        port = free.getsockname()[1]
    relay = StoreRelay(listener(), (LOOPBACK, port)).start()
    with connected(relay) as connection:
        assert connection.recv(1) == b""
    relay.close()


def test_a_relay_of_one_connection_ends_with_it(echo: Echo, relays: Relays) -> None:
    relay = StoreRelay(listener(), echo.address, only_s=10.0).start()
    with connected(relay) as connection:
        assert said_back(connection, b"here") == b"here"
        assert relays.running()
        with pytest.raises(ConnectionRefusedError):
            connected(relay)
    relays.await_none()


def test_a_relay_of_one_connection_does_not_wait_for_ever(echo: Echo, relays: Relays) -> None:
    began = time.monotonic()
    StoreRelay(listener(), echo.address, only_s=0.1).start()
    relays.await_none()
    assert time.monotonic() - began < 5.0


def test_a_forked_child_leaves_it_to_its_parent(echo: Echo) -> None:
    relay = StoreRelay(listener(), echo.address).start()
    assert in_a_forked_child(relay.close) == 0
    with connected(relay) as connection:
        assert said_back(connection, b"here") == b"here"
    relay.close()


def test_torch_sees_loopback_alone(monkeypatch: pytest.MonkeyPatch, relays: Relays) -> None:
    """What it would ask the name service for, and wait."""
    hosts = []

    def noted(host: str, *args: Any, **settings: Any) -> TCPStore:
        hosts.append(host)
        return TCPStore(host, *args, **settings)

    monkeypatch.setattr("raydist.collectives.rendezvous.store.TCPStore", noted)
    with RendezvousStore(ELSEWHERE) as store:
        memberships = [store.membership("g", generation=0, rank=rank, world_size=2) for rank in range(2)]
        assert {membership.store_host for membership in memberships} == {ELSEWHERE}
        ends = [connect_store(membership, 10.0) for membership in memberships]
        ends[0].set("key", "value")
        assert ends[1].get("key") == b"value"
        ends.clear()
    assert set(hosts) == {LOOPBACK}
    assert len(hosts) >= 3
    relays.await_none()


def test_members_of_a_store_that_was_closed_are_told(relays: Relays) -> None:
    store = RendezvousStore(ELSEWHERE).start()
    membership = store.membership("g", generation=0, rank=0, world_size=1)
    end = connect_store(membership, 5.0)
    store.close()
    with pytest.raises(RuntimeError):
        end.get("key")
    with pytest.raises(DeadlineExceededError, match=f"the store at {ELSEWHERE}:"):
        connect_store(membership, 0.3)
    del end
    relays.await_none()


def test_a_store_that_is_dropped_leaves_nobody_listening(relays: Relays) -> None:
    store = RendezvousStore(ELSEWHERE).start()
    port = store.port
    del store
    relays.await_none()
    with socket.create_server((ELSEWHERE, port)):
        pass


def test_it_goes_on_after_an_error_of_accepting(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, errors = StoreRelay._accept, [OSError(24, "Too many open files")]

    async def fails_once(relay: StoreRelay) -> socket.socket:
        if errors:
            raise errors.pop()
        return await accept(relay)

    monkeypatch.setattr(StoreRelay, "_accept", fails_once)
    relay = StoreRelay(listener(), echo.address).start()
    with connected(relay) as connection:
        assert said_back(connection, b"here") == b"here"
    relay.close()


def test_addresses_of_others_are_refused() -> None:
    """Each time: a server that nobody could reach is not taken for one that was started."""
    store = RendezvousStore("192.0.2.77")
    for _ in range(2):
        with pytest.raises(OSError, match=os.strerror(99)):
            store.start()
