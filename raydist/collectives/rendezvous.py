"""The rendezvous of a group's members: a key-value store (torch's TCPStore) that outlives them.

The owner (a strategy on the driver, or rank 0) opens a :class:`RendezvousStore` and hands out memberships; each member
connects with :func:`connect_store`. Keys begin with the group's name and the generation, so a new generation never
reads a late message of an old one. As with `torchrun`, anyone who reaches the port can read and write: the network must
be trusted, and the server listens on one address only.

The store also holds data that ranks exchange, and the reason of a failure (:class:`ErrorBroadcast`). Sockets do not
suffice: a rank that waits for a living peer does not notice the death of a third rank, and gloo has no abort. So the
first rank that detects a failure posts it in the store, where waiting ranks poll.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from datetime import timedelta
from types import TracebackType
from typing import final

from raydist.collectives.base import Membership
from raydist.collectives.translation import describe_operation, describe_ranks, translate_torch_error
from raydist.compat.torch_internals import PrefixStore, Store, TCPStore
from raydist.core.errors import (
    CancelledError,
    CollectiveMismatchError,
    DeadlineExceededError,
    FailedPreconditionError,
    RaydistError,
    UnavailableError,
)
from raydist.core.fork_guard import never_free, register_after_fork

_KINDS: dict[str, type[RaydistError]] = {
    kind.__name__: kind for kind in (CancelledError, CollectiveMismatchError, DeadlineExceededError, UnavailableError)
}
_FAILURE = "failure"
_POLL_S = 0.005
_LIVENESS_S = 0.3
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.0002, 0.05
_READ_BY_ALL = 2  # all members have read exchange k - 2 before exchange k, since they took part in k - 1


@final
class ErrorBroadcast:
    """The first failure of one generation, which members publish and poll in the store, for one member.

    `exchange` passes small data through the same store, without the device and the sockets of the group.
    """

    def __init__(self, store: Store, membership: Membership) -> None:
        self._store = store
        self._membership = membership
        self._num_exchanges = 0
        self._lock = threading.Lock()
        self._failure: RaydistError | None = None

    def exchange(self, data: bytes, what: str, timeout_s: float) -> list[bytes]:
        """Return every rank's data, by rank. Blocking: until all ranks have called it, at most `timeout_s` seconds.

        Raises:
            DeadlineExceededError: Ranks are missing; the message names them, and the purpose of the exchange.
            RaydistError: A member has failed meanwhile.
        """
        self._num_exchanges += 1
        number, rank = self._num_exchanges, self._membership.rank
        if number > _READ_BY_ALL:
            self._store.set(f"told/{number - _READ_BY_ALL}/{rank}", ".")
        keys = [f"told/{number}/{other}" for other in range(self._membership.world_size)]
        self._store.set(keys[rank], b"." + data)  # type: ignore[arg-type]  # torch's stub lacks bytes
        deadline, pause_s = time.monotonic() + timeout_s, _LEAST_PAUSE_S
        while not self._store.check(keys):
            if time.monotonic() >= deadline:
                missing = [other for other, key in enumerate(keys) if not self._store.check([key])]
                raise DeadlineExceededError(
                    f"{describe_operation(self._membership, what)} timed out after {timeout_s} s: "
                    f"{describe_ranks(missing)} did not arrive. Raise the limit if they were only slow."
                )
            if self.listen():
                self.name_missing_ranks()  # the peer posted its failure before its liveness check
            self.check(what)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)
        return [self._store.get(key)[1:] for key in keys]

    @property
    def failed(self) -> bool:
        """True if this member knows of a failure."""
        return self._failure is not None

    def check(self, operation: str) -> None:
        """Raise the failure that has ended this generation, if this member knows of one."""
        failure = self._failure
        if failure is not None:
            raise type(failure)(
                f"{describe_operation(self._membership, operation)} was given up: {failure.message} "
                "Open the group anew to go on."
            )

    def fail(self, failure: RaydistError) -> None:
        """Record a failure, and publish it unless there is one already. Ignores a store that is closed."""
        with self._lock:
            self._failure = self._failure or failure
        kind = type(failure).__name__ if type(failure).__name__ in _KINDS else UnavailableError.__name__
        with contextlib.suppress(RuntimeError):
            if peek(self._store, _FAILURE) is None:
                self._store.set(_FAILURE, f"{kind}\n{failure.message}")

    def listen(self) -> bool:
        """Look for a failure that a member has published; return True if this member did not know of one before."""
        if self.failed:
            return False
        try:
            posted = peek(self._store, _FAILURE)
        except RuntimeError:
            owner = f"{self._membership.store_host}:{self._membership.store_port}"
            heard: RaydistError = UnavailableError(
                f"The rendezvous store at {owner} is gone: the owner of the group has ended."
            )
        else:
            if posted is None:
                return False
            kind, _, message = posted.decode().partition("\n")
            heard = _KINDS.get(kind, UnavailableError)(message)
        with self._lock:
            self._failure = self._failure or heard
        return True

    def name_missing_ranks(self) -> RaydistError | None:
        """Add the ranks that do not answer a liveness check to the failure, and return the failure.

        Blocking: until all ranks have called it, at most 0.3 s.
        """
        failure = self._failure
        if failure is None or isinstance(failure, CancelledError | CollectiveMismatchError):
            return failure
        missing = self.check_liveness(_LIVENESS_S)
        if missing:
            self._failure = type(failure)(f"{failure.message} No sign of {describe_ranks(missing)}.")
        return self._failure

    def check_liveness(self, limit_s: float) -> tuple[int, ...]:
        """Report this rank after a failure, and return the ranks that do not report within `limit_s` seconds."""
        deadline, missing = time.monotonic() + limit_s, tuple(range(self._membership.world_size))
        with contextlib.suppress(RuntimeError):  # the store is closed
            self._store.set(f"seen/{self._membership.rank}", "")
            while missing := tuple(rank for rank in missing if not self._store.check([f"seen/{rank}"])):
                if time.monotonic() >= deadline:
                    return missing
                time.sleep(_POLL_S)
        return ()


_LOOPBACK = "127.0.0.1"
# Limits once the port has answered: a server that has died meanwhile fails soon; a busy one has some time.
_CONNECT_S = 30.0
_BUSY_S = 10.0


@final
class RendezvousStore:
    """The server of the store, for any number of groups and generations.

    Args:
        host: Address on which the server listens and members connect: loopback if all members are on this machine.

    >>> with RendezvousStore("127.0.0.1") as store:
    ...     store.membership("g", generation=0, rank=1, world_size=2).store_host
    '127.0.0.1'
    """

    def __init__(self, host: str = _LOOPBACK) -> None:
        self.host = host
        self._server: TCPStore | None = None
        register_after_fork(self)

    def after_fork_in_child(self) -> None:
        """Keep a forked child, in which no server thread runs, from freeing the server."""
        never_free(self._server)

    def start(self) -> RendezvousStore:
        """Listen on a free port. Blocks for some ms. May be called twice.

        Raises:
            OSError: This machine does not have the address.
        """
        if self._server is None:
            listener = socket.create_server((self.host, 0), family=_family(self.host), backlog=512)
            port = listener.getsockname()[1]
            self._server = TCPStore(
                self.host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        return self

    @property
    def port(self) -> int:
        if self._server is None:
            raise FailedPreconditionError(
                f"The RendezvousStore on {self.host} has no port before it is started. Use `start()` or `with`."
            )
        return int(self._server.port)

    def membership(
        self, group: str, *, generation: int, rank: int, world_size: int, hosts: tuple[str, ...] = ()
    ) -> Membership:
        """Return the membership of one rank, with this store's address."""
        return Membership(group, generation, rank, world_size, self.host, self.port, hosts)

    def close(self) -> None:
        """Stop the server. Existing groups keep working until a member fails. May be called twice."""
        self._server = None

    def __enter__(self) -> RendezvousStore:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def connect_store(membership: Membership, timeout_s: float) -> PrefixStore:
    """Connect to the store of a membership, with keys of its group and generation.

    Blocking: until the server accepts, at most `timeout_s` seconds.

    Raises:
        DeadlineExceededError: No server answers at the membership's address.
    """
    _await_listener(membership, timeout_s)
    timeout = timedelta(seconds=min(timeout_s, _CONNECT_S) + _BUSY_S)
    try:
        store = TCPStore(
            membership.store_host, membership.store_port, is_master=False, wait_for_workers=False, timeout=timeout
        )
    except RuntimeError as error:
        raise translate_torch_error(error, membership, "rendezvous") from error
    store.set_timeout(timedelta(seconds=timeout_s))
    return PrefixStore(f"{membership.group}/{membership.generation}", store)


def peek(store: Store, key: str) -> bytes | None:
    """Return the value of a key, or None if no rank has written it yet. Does not wait for a value."""
    return store.get(key) if store.check([key]) else None


def _await_listener(membership: Membership, timeout_s: float) -> None:
    # TCPStore's own retries write a C++ stack trace to the log for each attempt.
    address = (membership.store_host, membership.store_port)
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=min(timeout_s, 5.0)):
            return
        if time.monotonic() >= deadline:
            raise DeadlineExceededError(
                f"{describe_operation(membership, 'rendezvous')} failed: the store at {membership.store_host}:"
                f"{membership.store_port} did not accept a connection for {timeout_s} s. Check that the owner of the "
                "group lives and is not stopped, and that this machine can reach it."
            )
        time.sleep(0.05)


def local_address(membership: Membership) -> str:
    """Return the address from which this machine reaches the store, and by which members reach this machine."""
    with socket.socket(_family(membership.store_host), socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing; it only consults the routing table.
        probe.connect((membership.store_host, membership.store_port))
        return str(probe.getsockname()[0])


def _family(host: str) -> socket.AddressFamily:
    try:
        return socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        return socket.AF_INET
