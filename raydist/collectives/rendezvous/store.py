"""Where the members of a group find each other: a small key-value server that somebody who outlives them keeps.

The owner (a strategy on the driver, or rank 0) opens a :class:`RendezvousStore` and hands out memberships; each member
connects with :func:`connect_store`. Keys carry the group's name and the generation, so a late message of an old
generation is never read by a new one; values are signed with the store's secret, which memberships carry.
"""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import socket
import time
import weakref
from datetime import timedelta
from types import TracebackType
from typing import final

from torch._C._distributed_c10d import TCPStore

from raydist.collectives.base import Membership
from raydist.collectives.rendezvous.signed_store import SignedStore
from raydist.collectives.rendezvous.store_relay import LOOPBACK, StoreRelay, needs_relay
from raydist.collectives.translation import describe_operation, translate_torch_error
from raydist.errors import DeadlineExceededError, FailedPreconditionError
from raydist.first_answer import first_answer
from raydist.owning_process import never_free, note_inherited

__all__ = ["RendezvousStore", "connect_store", "local_address"]

# What a lookup of a name takes at most with the usual two attempts of 5 s. An attempt that others have overtaken then
# ends quietly, not with a stack trace in the log.
_LOOKUP_S = 10.0
_START_S = 60.0
_CONNECT_S = 30.0  # somebody listens, it is known by then: what finds nobody any more need not try for minutes


@final
class RendezvousStore:
    """The server half. One serves any number of groups and generations.

    Args:
        host: Address to listen on and to be reached at: the loopback address where all members are on this machine.

    Attributes:
        secret: What members sign their entries with.

    >>> with RendezvousStore("127.0.0.1") as store:
    ...     store.membership("g", generation=0, rank=1, world_size=2).store_host
    '127.0.0.1'
    """

    def __init__(self, host: str = LOOPBACK) -> None:
        self.host = host
        self.secret = secrets.token_bytes(32)
        self._server: TCPStore | None = None
        self._relay: StoreRelay | None = None
        note_inherited(self)

    def became_a_copy(self) -> None:
        """This is a forked child, which has nobody listen."""
        never_free(self._server)

    def start(self) -> RendezvousStore:
        """Listen on a free port. Blocking: mostly some ms, at most a minute. May be called twice.

        Raises:
            OSError: This machine does not have that address, or (TimeoutError) its name service never answers.
        """
        if self._server is None:
            self._server, self._relay = self._open()
            if self._relay is not None:
                weakref.finalize(self, self._relay.close).atexit = False
        return self

    def _open(self) -> tuple[TCPStore, StoreRelay | None]:
        # A server connects to itself, and may ask the name service like every other client: see `_client`.
        if not needs_relay(self.host):
            return first_answer(lambda _: _serve(self.host), _START_S, name="raydist-rendezvous"), None
        with contextlib.ExitStack() as undo:
            outside = undo.enter_context(_listener(self.host))  # first what can be wrong: an address of somebody else
            server = first_answer(lambda _: _serve(LOOPBACK), _START_S, name="raydist-rendezvous")
            undo.pop_all()
        return server, StoreRelay(outside, (LOOPBACK, int(server.port))).start()

    @property
    def port(self) -> int:
        if self._server is None:
            raise FailedPreconditionError(
                f"The RendezvousStore on {self.host} has no port before it is started. Use `start()` or `with`."
            )
        return int(self._server.port) if self._relay is None else self._relay.port

    def membership(
        self, group: str, *, generation: int, rank: int, world_size: int, hosts: tuple[str, ...] = ()
    ) -> Membership:
        """The place of one member, with this store's address."""
        return Membership(group, generation, rank, world_size, self.host, self.port, self.secret, hosts)

    def close(self) -> None:
        """Stop listening. Groups that are formed keep working until a member fails. May be called twice."""
        if self._relay is not None:
            self._relay.close()
        self._server = self._relay = None

    def __enter__(self) -> RendezvousStore:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def connect_store(membership: Membership, timeout_s: float) -> SignedStore:
    """The client half: the keys of one generation of one group.

    Blocking: until the server accepts, at most `timeout_s` seconds.

    Raises:
        DeadlineExceededError: No server answers at the membership's address.
    """
    deadline = time.monotonic() + timeout_s
    _await_listener(membership, timeout_s)
    try:
        store = first_answer(
            lambda left_s: _client(membership, left_s), max(deadline - time.monotonic(), 0.0), name="raydist-rendezvous"
        )
    except TimeoutError:
        raise DeadlineExceededError(
            _no_answer(membership, timeout_s, "accepted the connection and did not answer")
        ) from None
    except RuntimeError as error:
        raise translate_torch_error(error, membership, "rendezvous") from error
    store.set_timeout(timedelta(seconds=timeout_s))
    return SignedStore(store, f"{membership.group}/{membership.generation}", membership.secret)


def _client(membership: Membership, timeout_s: float) -> TCPStore:
    """Blocking: beyond the limit where the server's name or its first reply does not come.

    For its log torch asks the name service for the address's name first: a lost packet costs 5 s. So it never sees
    another address than loopback; but that is asked for, too, where no file of this machine says what it is called.
    And it has no limit for the first reply: a server that is stopped keeps it for as long as it is.
    """
    host, port = membership.store_host, membership.store_port
    limit_s = min(timeout_s, _CONNECT_S)
    if needs_relay(host):
        relay = StoreRelay(_listener(LOOPBACK), (host, port), only_s=limit_s).start()
        host, port = LOOPBACK, relay.port
    timeout = timedelta(seconds=limit_s + _LOOKUP_S)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def _serve(host: str) -> TCPStore:
    listener = _listener(host)
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _listener(host: str) -> socket.socket:
    return socket.create_server((host, 0), family=_family(host), backlog=512)


def _await_listener(membership: Membership, timeout_s: float) -> None:
    # TCPStore's own retries write a C++ stack trace to the log for each attempt.
    address = (membership.store_host, membership.store_port)
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=min(timeout_s, 5.0)):
            return
        if time.monotonic() >= deadline:
            raise DeadlineExceededError(_no_answer(membership, timeout_s, "did not accept a connection"))
        time.sleep(0.05)


def _no_answer(membership: Membership, timeout_s: float, what: str) -> str:
    return (
        f"{describe_operation(membership, 'rendezvous')} failed: the store at {membership.store_host}:"
        f"{membership.store_port} {what} for {timeout_s} s. Check that the owner of the group lives and "
        "is not stopped, and that this machine can reach it."
    )


def local_address(membership: Membership) -> str:
    """The address of this machine that faces the store, hence the other members: loopback where the store is local."""
    with socket.socket(_family(membership.store_host), socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing: it only asks the routing table.
        probe.connect((membership.store_host, membership.store_port))
        return str(probe.getsockname()[0])


def _family(host: str) -> socket.AddressFamily:
    try:
        return socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        return socket.AF_INET
