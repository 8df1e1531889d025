"""Ranks in a ring, each connected to the next: when a process ends, however it does, its neighbour's line goes dead."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from typing import final

from torch._C._distributed_c10d import Store

from raydist.collectives.base import Membership
from raydist.collectives.rendezvous import local_address

__all__ = ["Neighbour"]


@final
class Neighbour:
    """The line to the next rank. Nothing is ever said on it.

    Args:
        membership: This rank's place.
        timeout_s: The limit of connecting.
    """

    def __init__(self, membership: Membership, timeout_s: float) -> None:
        self.rank = (membership.rank + 1) % membership.world_size
        self._membership = membership
        self._timeout_s = timeout_s
        self._lines: list[socket.socket] = []
        self._outgoing: socket.socket | None = None

    def connect(self, store: Store) -> Neighbour:
        """Blocking: until both neighbours have connected, at most the limit.

        Raises:
            OSError: They can't reach each other.
        """
        host = local_address(self._membership)
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        with socket.create_server((host, 0), family=family) as listener:
            listener.settimeout(self._timeout_s)
            store.set(f"line/{self._membership.rank}", f"{listener.getsockname()[1]} {host}")
            port, _, address = store.get(f"line/{self.rank}").decode().partition(" ")
            self._outgoing = socket.create_connection((address, int(port)), timeout=self._timeout_s)
            self._lines.append(self._outgoing)
            self._lines.append(listener.accept()[0])
        for line in self._lines:
            line.setblocking(False)
        return self

    def is_gone(self) -> bool:
        """Whether the next rank has left, or its process has ended."""
        if self._outgoing is None:
            return False
        try:
            return self._outgoing.recv(1) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Leave the ring. May be called twice."""
        self._outgoing = None
        while self._lines:
            with contextlib.suppress(OSError):
                self._lines.pop().close()
