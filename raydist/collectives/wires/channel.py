"""One direction between two ranks: bytes in order, over a TCP connection that is never waited for.

Whoever has something to send or a place to receive into does at once what the kernel takes; the rest is done when the
kernel says so, by the thread of `wires.py`. The bytes go from tensor to kernel to tensor.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, final

import numpy as np
import torch

from raydist.collectives.wires.flat_bytes import flat_bytes

__all__ = ["Attendance", "Channel", "Passage", "bytes_of"]

# How much one call of the kernel is asked for: while one runs, nobody else uses the channel.
_MOST_AT_ONCE = 4 << 20
# Of a transfer of which as much is left, the kernel tells when all has come, or so much: each time costs a switch and
# Python's way here. 10 MB among 4 ranks of 2 hosts take 10 ms, where they took 12 when it told of whatever came.
_LARGE_REST = 256 << 10
_MOST_TOLD = 1 << 20
# The kernel tells of changes alone: whoever starts something looks for himself what is there already.
_ALWAYS = select.EPOLLRDHUP | select.EPOLLET
_ENDED = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_NOTHING = memoryview(b"")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    if not tensor.numel():
        return _NOTHING
    data: np.ndarray[Any, Any] = flat_bytes(tensor).numpy()
    return data.data


class Passage:
    """Bytes on their way.

    Attributes:
        peer: The rank at the other end.
        done: Whether they are all there, or all gone.
        broken: Whether they never will be: the peer is gone.
    """

    __slots__ = ("_left", "broken", "done", "peer")

    def __init__(self, peer: int, data: memoryview) -> None:
        self.peer = peer
        self.done = not data.nbytes
        self.broken = False
        self._left = data

    def proceed(self, step: Callable[[memoryview], int]) -> bool:
        """Take one step; False where the kernel wants no more of it now.

        Raises:
            OSError: The connection has ended.
        """
        try:
            count = step(self._left[:_MOST_AT_ONCE])
        except (BlockingIOError, InterruptedError):
            return False
        if not count:
            raise ConnectionResetError(f"rank {self.peer} has ended the connection")
        self._left = self._left[count:] or self._next()
        self.done = not self._left
        return True

    def _next(self) -> memoryview:
        """What follows, once all is there that was to come so far; nothing where that was it."""
        return _NOTHING

    @property
    def num_left(self) -> int:
        """Bytes that are not there, or not gone, yet."""
        return self._left.nbytes


@final
class Attendance:
    """Who serves the channels of a rank: the thread of the wires, or the rank itself while it waits.

    Attributes:
        attended: Whether it is the rank.
        pending: Channels on which something waits.
    """

    def __init__(self) -> None:
        self.attended = False
        self.pending: set[Channel] = set()


@final
class Channel:
    """One end of a direction. Any thread may use it.

    Args:
        peer: The rank at the other end.
        incoming: Whether bytes come from there.
        attendance: Who serves it.
        settled: Called from the thread of the wires after something that had to wait has ended.
    """

    def __init__(self, peer: int, *, incoming: bool, attendance: Attendance, settled: Callable[[], None]) -> None:
        self._peer = peer
        self._incoming = incoming
        self._attendance = attendance
        self._settled = settled
        self._watched = _ALWAYS
        self._told_of = 1
        self._lock = threading.Lock()
        self._waiting: deque[Passage] = deque()
        self._socket: socket.socket | None = None
        self._poll: select.epoll | None = None
        self._over = False

    @property
    def connected(self) -> bool:
        return self._socket is not None or self._over

    def connect(self, connection: socket.socket, poll: select.epoll) -> None:
        """Use this connection, which does not block; `poll` watches it from now on."""
        with self._lock:
            self._socket, self._poll = connection, poll
            poll.register(connection.fileno(), self._watched)
            self._advance()

    def start(self, data: memoryview) -> Passage:
        """Send these bytes, or fill them, after whatever was started before."""
        transfer = Passage(self._peer, data)
        self.carry(transfer)
        return transfer

    def carry(self, transfer: Passage) -> None:
        """Do the same for a passage that was made elsewhere, with the peer of this channel."""
        with self._lock:
            if not transfer.done:
                self._waiting.append(transfer)
                if len(self._waiting) == 1:
                    self._advance()

    def request(self) -> tuple[int, int]:
        """The descriptor of the connection, and what it is to be polled for; (-1, 0) where there is nothing."""
        with self._lock:
            if self._socket is None or not self._waiting:
                return -1, 0
            return self._socket.fileno(), select.POLLIN if self._incoming else select.POLLOUT

    def advance(self) -> None:
        """Do all that the kernel takes now: for who attends."""
        with self._lock:
            self._advance()

    def assign(self) -> None:
        """Have the thread serve it, or not, as the attendance now says."""
        with self._lock:
            self._watch()

    def ready(self, event: int) -> None:
        """The kernel has something to say, to the thread of the wires."""
        with self._lock:
            before = len(self._waiting)
            if event & _ENDED:
                self._unwatch()
                self._over = True
            self._advance()
            settled = len(self._waiting) < before
        if settled:
            self._settled()

    def close(self) -> None:
        """Say no more; what waits is broken. May be called twice."""
        with self._lock:
            self._end()

    def became_a_copy(self) -> None:
        """This is a forked child: it would go on showing that a dead parent lives. Locks and polls are the parent's."""
        connection, self._socket, self._over = self._socket, None, True
        if connection is not None:
            connection.close()

    def _advance(self) -> None:
        """Do all that the kernel takes now; the lock is held."""
        try:
            while self._waiting and self._socket is not None:
                step = self._socket.recv_into if self._incoming else self._socket.send
                if not self._waiting[0].proceed(step):
                    break
                if self._waiting[0].done:
                    self._waiting.popleft()
        except OSError:
            self._end()
        # What came before the peer's end is still read; nothing is sent to it any more.
        if self._over and (not self._incoming or self._socket is None):
            self._end()
        if self._waiting:
            self._attendance.pending.add(self)
            self._set_told_of(self._waiting[0].num_left)
            self._watch()
        else:
            self._attendance.pending.discard(self)

    def _set_told_of(self, num_left: int) -> None:
        """Have the kernel tell of so many bytes, of a transfer of which `num_left` are to come: more never might."""
        told_of = min(num_left, _MOST_TOLD) if self._incoming and num_left >= _LARGE_REST else 1
        if told_of != self._told_of and self._socket is not None:
            self._told_of = told_of
            with contextlib.suppress(OSError):  # a system without it tells of whatever comes
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, told_of)

    def _watch(self) -> None:
        wanted = _ALWAYS
        if self._waiting and not self._attendance.attended:
            wanted |= select.EPOLLIN if self._incoming else select.EPOLLOUT
        # After the peer's end the kernel has all that will ever come: nothing need be waited for.
        if wanted != self._watched and self._socket is not None and self._poll is not None and not self._over:
            self._poll.modify(self._socket.fileno(), wanted)
            self._watched = wanted

    def _end(self) -> None:
        self._unwatch()
        self._over = True
        connection, self._socket = self._socket, None
        while self._waiting:
            self._waiting.popleft().broken = True
        if connection is not None:
            connection.close()

    def _unwatch(self) -> None:
        if self._socket is not None and self._poll is not None and not self._over:
            self._poll.unregister(self._socket.fileno())
