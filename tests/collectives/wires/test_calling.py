from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from raydist.collectives.wires.calling import Reception, call_peer
from raydist.collectives.wires.handshake import Credentials, Introduction

MINE, OTHER = Credentials("g/0", b"secret"), Credentials("g/0", b"other")
HELLO = Introduction(source=3, destination=0, topic=1)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        yield server


def receive(listener: socket.socket, credentials: Credentials) -> Introduction:
    connection, _ = listener.accept()
    connection.setblocking(True)
    reception = Reception(connection, credentials)
    try:
        while True:
            introduction = reception.proceed()
            if introduction is not None:
                return introduction
    finally:
        reception.close()


def call_from_thread(address: tuple[str, int], outcome: list[object]) -> threading.Thread:
    def call() -> None:
        try:
            call_peer(address, MINE, HELLO, 10.0).close()
            outcome.append("connected")
        except OSError as error:
            outcome.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_a_member_is_introduced(listener: socket.socket) -> None:
    outcome: list[object] = []
    thread = call_from_thread(listener.getsockname(), outcome)
    assert receive(listener, MINE) == HELLO
    thread.join()
    assert outcome == ["connected"]


@pytest.mark.parametrize(("address", "is_at_home"), [("127.0.0.1", True), ("127.0.0.2", False)])
def test_the_system_chooses_how_bytes_are_paced_between_machines(address: str, is_at_home: bool) -> None:
    """The caller's own address is 127.0.0.1 whatever it calls here."""
    with socket.socket() as plain:
        usual = plain.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
    with socket.create_server((address, 0)) as server:
        server.settimeout(10)
        thread = threading.Thread(target=receive, args=(server, MINE))
        thread.start()
        with call_peer(server.getsockname(), MINE, HELLO, 10.0) as connection:
            chosen = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
        thread.join(10)
    assert chosen == (b"reno" if is_at_home else usual)


def test_who_answers_must_be_a_member(listener: socket.socket) -> None:
    outcome: list[object] = []
    thread = call_from_thread(listener.getsockname(), outcome)
    with pytest.raises(ConnectionError):
        receive(listener, OTHER)
    thread.join()
    assert isinstance(outcome[0], ConnectionRefusedError)


def test_who_calls_must_be_a_member(listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname()) as stranger:
        stranger.sendall(bytes(500))
        with pytest.raises(ConnectionRefusedError, match="no member"):
            receive(listener, MINE)


def test_who_says_nothing_keeps_nobody_waiting(listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        connection.setblocking(False)
        reception = Reception(connection, MINE)
        assert reception.proceed() is None
        reception.close()


def test_a_silent_peer_is_given_up(listener: socket.socket) -> None:
    with pytest.raises(TimeoutError):
        call_peer(listener.getsockname(), MINE, HELLO, 0.2)
