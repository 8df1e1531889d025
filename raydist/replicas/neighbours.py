"""Copies of each replica's own state at the next replica, from which its replacement continues.

A replica sends what exists nowhere else (`OwnState`) to the replica with the next rank: after each step, and before
each backward pass, since its peers may complete a step in which it is lost after its part of the exchange. The kernel
buffers a message of this size, so sending does not wait for the receiver; and what was handed to the kernel arrives
even if the sender is killed in the next moment. A state that has not changed is not sent again.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import final

from raydist.collectives.base import Membership
from raydist.collectives.rendezvous import connect_store, local_address

MOST_BYTES = 1 << 20
_HEADER = struct.Struct("<qq?q")  # boundary, shared, early, number of bytes; -1 bytes: as before
_KEPT = 2  # with different `shared`: replicas are at most one step with an exchange apart
_ADDRESS = "neighbours/{}"
_BUFFER_BYTES = 4 * MOST_BYTES


@final
class Neighbours:
    """The copies that one replica keeps for the previous rank, and the connection to the next rank."""

    def __init__(self) -> None:
        self._held: list[tuple[int, int, bytes]] = []  # boundary, shared, state
        self._early: tuple[int, int, bytes] | None = None  # of a step under way, as if it had ended
        self._lock = threading.Lock()
        self._next: socket.socket | None = None
        self._listener: socket.socket | None = None
        self._sent = b""
        self._is_sent_early = False

    def join(self, membership: Membership, timeout_s: float) -> None:
        """Connect to the next rank of a new generation. Blocks until it listens; does nothing for one rank."""
        self.close()
        if membership.world_size == 1 or not membership.store_host:
            return
        store = connect_store(membership, timeout_s)
        address = local_address(membership)
        self._listener = socket.create_server((address, 0), family=socket.getaddrinfo(address, 0)[0][0])
        threading.Thread(target=self._receive, args=(self._listener,), name="raydist-neighbour", daemon=True).start()
        port = self._listener.getsockname()[1]
        store.set(_ADDRESS.format(membership.rank), f"{address} {port}")
        following = (membership.rank + 1) % membership.world_size
        host, _, place = store.get(_ADDRESS.format(following)).decode().partition(" ")
        self._next = socket.create_connection((host, int(place)), timeout=timeout_s)
        self._next.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._next.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sent = b""

    def has(self, state: bytes) -> bool:
        """Return True if the next rank has this state of a boundary."""
        return state == self._sent and not self._is_sent_early

    def send(self, boundary: int, shared: int, state: bytes, *, early: bool = False) -> None:
        """Send this replica's own state at a boundary, or `early`: within the step before it.

        A state above 1 MB is not sent. Errors are left to collectives.
        """
        if self._next is None or len(state) > MOST_BYTES:
            return
        again = state == self._sent
        self._sent, self._is_sent_early = state, early
        header = _HEADER.pack(boundary, shared, early, -1 if again else len(state))
        with contextlib.suppress(OSError):  # the next rank is gone, which a collective notices soon
            self._next.sendall(header if again else header + state)

    def _receive(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError), listener, listener.accept()[0] as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
            file, state = connection.makefile("rb"), b""
            while len(header := file.read(_HEADER.size)) == _HEADER.size:
                boundary, shared, early, size = _HEADER.unpack(header)
                if size >= 0:
                    state = file.read(size)
                    if len(state) < size:
                        return
                self._keep((boundary, shared, state), early=early)

    def _keep(self, copy: tuple[int, int, bytes], *, early: bool) -> None:
        with self._lock:
            self._early = copy if early else None
            if not early:
                # A copy of a later step is from before the rank went back.
                others = [held for held in self._held if held[0] < copy[0] and held[1] != copy[1]]
                self._held = [*others, copy][-_KEPT:]

    def _copies(self) -> list[tuple[int, int, bytes]]:
        with self._lock:
            return [*self._held, *([] if self._early is None else [self._early])]

    def copies(self) -> list[tuple[int, int]]:
        """Return (boundary, shared) of the copies for the previous rank."""
        return [(boundary, shared) for boundary, shared, _ in self._copies()]

    def copy(self, boundary: int) -> bytes:
        """Return the copy at a boundary."""
        return next(state for at, _, state in reversed(self._copies()) if at == boundary)

    def close(self) -> None:
        """Close the connections; the copies stay. May be called twice."""
        for each in (self._next, self._listener):
            if each is not None:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()
        self._next = self._listener = None
