"""All connections of one rank to ranks of other hosts, and the thread that serves them.

A connection goes one way and carries one topic, so that a message that nobody takes is in no collective's way. The
sender opens it when it first has something to send.
"""

from __future__ import annotations

import contextlib
import enum
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import final

import torch

from raydist.collectives.base import Membership
from raydist.collectives.rendezvous.signed_store import SignedStore
from raydist.collectives.rendezvous.store import local_address
from raydist.collectives.translation import describe_operation
from raydist.collectives.wires.calling import Reception, call_peer
from raydist.collectives.wires.channel import Attendance, Channel, Passage, bytes_of
from raydist.collectives.wires.handshake import Credentials, Introduction
from raydist.errors import DeadlineExceededError, RaydistError, UnavailableError
from raydist.owning_process import note_inherited

__all__ = ["Topic", "Wires"]

_Sendable = torch.Tensor | bytes | memoryview

_POLL_S = 0.002
_MOST_CALLERS = 256


@final
class Topic(enum.IntEnum):
    """What a connection is for."""

    COLLECTIVE = 0
    MESSAGE = 1


@final
class Wires:
    """One rank's connections in one generation.

    Args:
        membership: This rank's place.
        timeout_s: The limit of connecting to a peer.
    """

    def __init__(self, membership: Membership, timeout_s: float) -> None:
        self._membership = membership
        self._timeout_s = timeout_s
        self._settled: Callable[[], None] = _nobody
        self._credentials = Credentials(f"{membership.group}/{membership.generation}", membership.secret)
        self._lock = threading.Lock()
        self._channels: dict[tuple[int, Topic, bool], Channel] = {}
        self._by_descriptor: dict[int, Channel | Reception] = {}
        self._poll = select.epoll()
        self._listener: socket.socket | None = None
        self._store: SignedStore | None = None
        self._closed = threading.Event()
        self._attendance = Attendance()
        self._nudge = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="raydist-wires", daemon=True)
        note_inherited(self)

    def start(
        self, store: SignedStore, peers: Sequence[int], *, settled: Callable[[], None], check: Callable[[], None]
    ) -> None:
        """Be reachable, and connected with these peers for collectives, both ways.

        Args:
            store: Where ranks say how they are reached.
            peers: Who does the same with this rank.
            settled: Called from another thread whenever something that had to wait is done or broken.
            check: Called between looks; raises to give up.

        Blocking: until they have come, at most the limit.
        """
        self._settled = settled
        host = local_address(self._membership)
        self._listener = socket.create_server((host, 0), family=_family_of(host), backlog=512)
        self._listener.setblocking(False)
        self._poll.register(self._listener.fileno(), select.EPOLLIN)
        self._thread.start()
        self._store = store
        store.set(_place(self._membership.rank), f"{self._listener.getsockname()[1]} {host}")
        deadline = time.monotonic() + self._timeout_s
        waiting = list(peers)
        while waiting:
            check()
            waiting = [peer for peer in waiting if not self._is_connected(peer)]
            if waiting and time.monotonic() >= deadline:
                raise DeadlineExceededError(
                    f"{describe_operation(self._membership, 'rendezvous')} timed out after {self._timeout_s} s: rank "
                    f"{waiting[0]} did not connect. Check that the hosts of the group reach each other."
                )
            if waiting:
                time.sleep(_POLL_S)

    def send(self, peer: int, data: _Sendable, topic: Topic = Topic.COLLECTIVE) -> Passage:
        """Send the bytes of a contiguous tensor, or plain ones; they may not be touched until that is done."""
        return self.channel_to(peer, topic).start(
            bytes_of(data) if isinstance(data, torch.Tensor) else memoryview(data)
        )

    def receive(self, peer: int, into: torch.Tensor | memoryview, topic: Topic = Topic.COLLECTIVE) -> Passage:
        """Fill a contiguous tensor, or plain memory, with what a peer sends."""
        data = bytes_of(into) if isinstance(into, torch.Tensor) else into
        return self.channel_from(peer, topic).start(data)

    def channel_to(self, peer: int, topic: Topic = Topic.COLLECTIVE) -> Channel:
        """What takes bytes there, for who sends often: it stays the same."""
        channel = self._channel(peer, topic, incoming=False)
        if not channel.connected:
            self._call(peer, topic, channel)
        return channel

    def channel_from(self, peer: int, topic: Topic = Topic.COLLECTIVE) -> Channel:
        """What brings bytes from there; it stays the same."""
        return self._channel(peer, topic, incoming=True)

    @property
    def is_busy(self) -> bool:
        """Whether something that was started waits for its peer."""
        return bool(self._attendance.pending)

    def attend(self) -> None:
        """Serve the connections oneself from now on: a thread less is woken on the way of what is waited for."""
        self._attendance.attended = True
        for channel in list(self._attendance.pending):
            channel.assign()

    def sleep(self, seconds: float) -> None:
        """While attending: return when something has moved, or after `seconds`."""
        poll = select.poll()
        poll.register(self._nudge, select.POLLIN)
        channels = {}
        for channel in list(self._attendance.pending):
            descriptor, event = channel.request()
            if event:
                channels[descriptor] = channel
                poll.register(descriptor, event)
        for descriptor, _ in poll.poll(1000 * seconds):
            if descriptor == self._nudge:
                os.eventfd_read(self._nudge)
            else:
                channels[descriptor].advance()

    def leave(self) -> None:
        """Leave the connections to the thread."""
        self._attendance.attended = False
        for channel in list(self._attendance.pending):
            channel.assign()

    def close(self) -> None:
        """End all connections and the thread. May be called twice."""
        self._closed.set()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(self._timeout_s)
        with self._lock:
            ends = [*self._channels.values(), *self._by_descriptor.values()]
            self._by_descriptor.clear()
        for end in ends:
            end.close()
        if self._listener is not None:
            self._listener.close()
        self._poll.close()
        nudge, self._nudge = self._nudge, -1
        if nudge >= 0:
            os.close(nudge)

    def became_a_copy(self) -> None:
        """This is a forked child, which serves nothing."""
        self._closed.set()
        for end in (*self._channels.values(), *self._by_descriptor.values()):
            end.became_a_copy()
        if self._listener is not None:
            self._listener.close()
        self._poll.close()

    # --- connecting ---------------------------------------------------------------------------------------------------

    def _is_connected(self, peer: int) -> bool:
        outgoing = self._channel(peer, Topic.COLLECTIVE, incoming=False)
        if not outgoing.connected and self._store is not None and self._store.check([_place(peer)]):
            self._call(peer, Topic.COLLECTIVE, outgoing)
        return outgoing.connected and self._channel(peer, Topic.COLLECTIVE, incoming=True).connected

    def _call(self, peer: int, topic: Topic, channel: Channel) -> None:
        mine = self._membership.rank
        port, host = self._address(peer).split(" ")
        introduction = Introduction(mine, peer, topic)
        try:
            connection = call_peer((host, int(port)), self._credentials, introduction, self._timeout_s)
        except OSError as error:
            raise UnavailableError(
                f"{describe_operation(self._membership, 'rendezvous')} failed: rank {peer} cannot be reached at "
                f"{host}:{port} ({error})."
            ) from error
        self._adopt(connection, channel)

    def _address(self, peer: int) -> str:
        if self._store is None:
            raise _not_started(self._membership)
        return self._store.get(_place(peer)).decode()

    def _channel(self, peer: int, topic: Topic, *, incoming: bool) -> Channel:
        key = (peer, topic, incoming)
        with self._lock:
            channel = self._channels.get(key)
            if channel is None:
                channel = self._channels[key] = Channel(
                    peer, incoming=incoming, attendance=self._attendance, settled=self._has_settled
                )
            return channel

    def _adopt(self, connection: socket.socket, channel: Channel) -> None:
        connection.setblocking(False)
        with self._lock:
            self._by_descriptor[connection.fileno()] = channel
        channel.connect(connection, self._poll)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closed.is_set():
            self._work()

    def _work(self) -> None:
        for descriptor, event in self._poll.poll():
            with self._lock:
                end = self._by_descriptor.get(descriptor)
            if self._closed.is_set():
                return
            if isinstance(end, Channel):
                end.ready(event)
            elif end is not None:
                self._receive_caller(descriptor, end)
            elif self._listener is not None and descriptor == self._listener.fileno():
                self._accept(self._listener)

    def _has_settled(self) -> None:
        """Something that had to wait has ended in the thread: it may be in the midst of it when the rank takes over."""
        if self._attendance.attended:
            os.eventfd_write(self._nudge, 1)
        else:
            self._settled()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            connection.setblocking(False)
            with self._lock:
                callers = [end for end in self._by_descriptor.values() if isinstance(end, Reception)]
                if len(callers) >= _MOST_CALLERS:
                    self._hang_up(min(callers, key=lambda caller: caller.since))
                self._by_descriptor[connection.fileno()] = Reception(connection, self._credentials)
            self._poll.register(connection.fileno(), select.EPOLLIN | select.EPOLLONESHOT)

    def _hang_up(self, caller: Reception) -> None:
        """On one who does not say who it is, where a stranger keeps others from calling; the lock is held."""
        self._by_descriptor.pop(caller.connection.fileno(), None)
        caller.close()

    def _receive_caller(self, descriptor: int, reception: Reception) -> None:
        try:
            introduction = reception.proceed()
            if introduction is None:
                self._poll.modify(descriptor, select.EPOLLIN | select.EPOLLONESHOT)
                return
            if introduction.destination != self._membership.rank:
                raise ConnectionRefusedError(f"rank {introduction.source} calls rank {introduction.destination}")
        except OSError:
            with self._lock:
                self._by_descriptor.pop(descriptor, None)
            reception.close()
            return
        self._poll.unregister(descriptor)
        channel = self._channel(introduction.source, Topic(introduction.topic), incoming=True)
        self._adopt(reception.connection, channel)


def _nobody() -> None:
    """Nothing waits before the wires are up."""


def _place(rank: int) -> str:
    return f"wires/{rank}"


def _family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _not_started(membership: Membership) -> RaydistError:
    return UnavailableError(f"{describe_operation(membership, 'send')} failed: the wires of the group are down.")
