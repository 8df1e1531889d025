from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from raydist.collectives.base import Membership
from raydist.collectives.rendezvous.store import RendezvousStore, connect_store, local_address
from raydist.errors import DeadlineExceededError, FailedPreconditionError


def test_generations_and_groups_do_not_see_each_other() -> None:
    with RendezvousStore() as store:
        ends = [
            connect_store(store.membership(group, generation=generation, rank=0, world_size=1), 5.0)
            for group, generation in (("a", 0), ("a", 1), ("b", 0))
        ]
        ends[0].set("key", "value")
        assert [end.check(["key"]) for end in ends] == [True, False, False]


def test_listens_only_where_it_is_told() -> None:
    with RendezvousStore("127.0.0.1") as store, socket.socket() as other:
        # The same port of another address of this machine is still free.
        other.bind(("127.0.0.2", store.port))
        assert local_address(store.membership("g", generation=0, rank=0, world_size=1)) == "127.0.0.1"


def test_closed_store_frees_its_port_and_has_none() -> None:
    store = RendezvousStore().start()
    port = store.port
    store.close()
    store.close()
    with pytest.raises(FailedPreconditionError, match="started"):
        _ = store.port
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))


def test_start_twice_is_one_server() -> None:
    with RendezvousStore() as store:
        assert store.start().port == store.port


def test_a_store_that_accepts_and_never_answers_is_an_error_in_time() -> None:
    with RendezvousStore() as store, _Way(store.port, held=100) as way:
        began = time.monotonic()
        with pytest.raises(DeadlineExceededError, match="did not answer for 1.0 s"):
            connect_store(way.membership, 1.0)
        assert time.monotonic() - began < 4.0


def test_a_connection_that_gets_stuck_is_tried_again() -> None:
    # The first connection is the probe, the second is torch's, the third its second try.
    with RendezvousStore() as store, _Way(store.port, held=2) as way:
        end = connect_store(way.membership, 5.0)
        end.set("key", "value")
        assert end.get("key") == b"value"
        inner: Any = end.inner  # torch's stubs do not know its `timeout`
        assert inner.timeout == timedelta(seconds=5)
        del end, inner  # closes the connection


def test_a_server_that_gets_stuck_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, released = itertools.count(), threading.Event()

    def stuck_once(*args: Any, **settings: Any) -> TCPStore:
        if next(calls) == 0:
            released.wait(30.0)
        return TCPStore(*args, **settings)

    monkeypatch.setattr("raydist.collectives.rendezvous.store.TCPStore", stuck_once)
    try:
        with RendezvousStore() as store:
            connect_store(store.membership("g", generation=0, rank=0, world_size=1), 5.0).set("key", "value")
            assert next(calls) == 3  # two servers, and the client of one
    finally:
        released.set()


class _Way:
    """Passes connections on to a port; the first ones only when it ends."""

    def __init__(self, port: int, held: int) -> None:
        self._port = port
        self._held = held
        self._ends = threading.Event()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self.membership = Membership("g", 0, 0, 1, "127.0.0.1", self._listener.getsockname()[1], b"secret", ())

    def __enter__(self) -> _Way:
        self._start(self._serve)
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(20.0)
        self._listener.close()

    def _start(self, work: Callable[..., None], *args: socket.socket) -> threading.Thread:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _serve(self) -> None:
        held: list[socket.socket] = []
        while not self._ends.is_set():
            with contextlib.suppress(TimeoutError):
                connection = self._listener.accept()[0]
                if len(held) < self._held:
                    held.append(connection)
                else:
                    self._start(self._pass_on, connection)
        for connection in held:
            self._start(self._pass_on, connection)

    def _pass_on(self, connection: socket.socket) -> None:
        with connection, socket.create_connection(("127.0.0.1", self._port)) as behind:
            back = self._start(_copy, behind, connection)
            _copy(connection, behind)
            back.join(10.0)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(4096):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
