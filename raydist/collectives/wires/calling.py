"""Opening a connection: the one who calls waits, the one who is called does not."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import final

from raydist.collectives.wires.handshake import (
    ANSWER_BYTES,
    GREETING_BYTES,
    INTRODUCTION_BYTES,
    Caller,
    Credentials,
    Introduction,
    Listener,
)

__all__ = ["Reception", "call_peer"]


def call_peer(
    address: tuple[str, int], credentials: Credentials, introduction: Introduction, timeout_s: float
) -> socket.socket:
    """A connection on which this rank is known to its peer, and the peer to be a member.

    Blocking: at most `timeout_s`.

    Raises:
        OSError: Nobody answers, or not a member of the group.
    """
    deadline = time.monotonic() + timeout_s
    connection = socket.create_connection(address, timeout=timeout_s)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _do_not_pace_at_home(connection)
        caller = Caller(credentials)
        connection.sendall(caller.greeting)
        said = caller.introduce(_read(connection, ANSWER_BYTES, deadline), introduction)
        if said is None:
            raise ConnectionRefusedError(f"who answers at {address} is no member of the group")
        connection.sendall(said)
    except BaseException:
        connection.close()
        raise
    return connection


def _do_not_pace_at_home(connection: socket.socket) -> None:
    """Nothing is lost between ranks of one machine, and they share its links with nobody.

    What the system uses for networks holds bytes back for them all the same: 4 ranks that each send another 50 MB, on 2
    cores, take 44 ms with BBR, 41 with CUBIC and 29 with Reno, which every Linux has. Between machines it is the
    system's choice.
    """
    if connection.getsockname()[0] == connection.getpeername()[0]:
        with contextlib.suppress(OSError):  # a system that forbids it
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def _read(connection: socket.socket, count: int, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionResetError(f"the peer has hung up after {len(data)} of {count} bytes")
        data += more
    return data


@final
class Reception:
    """Somebody who calls, until it is known who.

    Args:
        connection: Does not block.
        credentials: What a member must know.

    Attributes:
        connection: As given.
        since: When it began, as `time.monotonic` counts.
    """

    def __init__(self, connection: socket.socket, credentials: Credentials) -> None:
        self.connection = connection
        self._listener = Listener(credentials)
        self.since = time.monotonic()
        self._said = b""
        self._answered = False

    def proceed(self) -> Introduction | None:
        """Read what has come; None until all of it has.

        Raises:
            OSError: The caller is no member, or has hung up.
        """
        wanted = INTRODUCTION_BYTES if self._answered else GREETING_BYTES
        try:
            more = self.connection.recv(wanted - len(self._said))
        except BlockingIOError:
            return None
        if not more:
            raise ConnectionResetError(f"the caller has hung up after {len(self._said)} of {wanted} bytes")
        self._said += more
        if len(self._said) < wanted:
            return None
        said, self._said = self._said, b""
        if not self._answered:
            self.connection.send(self._listener.answer(said))
            self._answered = True
            return None
        introduction = self._listener.introduced(said)
        if introduction is None:
            raise ConnectionRefusedError(f"the caller at {self.connection.getpeername()} is no member of the group")
        return introduction

    def close(self) -> None:
        """Hang up."""
        self.connection.close()

    def became_a_copy(self) -> None:
        """This is a forked child: the caller is its parent's affair."""
        self.connection.close()
