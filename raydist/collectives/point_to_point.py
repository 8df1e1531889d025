"""Point-to-point messages between two ranks of a group, over gloo.

The first send or recv of a pair of ranks opens a connection, in a background thread. Each direction of a pair has a
thread, which handles messages one after the other.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from dataclasses import replace
from typing import final

import torch

from raydist.collectives.base import Communicator, Membership, Work
from raydist.collectives.process_group import GlooBackend
from raydist.collectives.tensors import describe_tensor, stage_bytes
from raydist.collectives.translation import describe_operation
from raydist.ending_threads import end_at_exit
from raydist.errors import CollectiveMismatchError, DeadlineExceededError, InvalidArgumentError, UnavailableError

__all__ = ["BackgroundQueue", "PointToPoint"]

_HEADER_BYTES = 256
_SLICE_S = 0.05
_IDLE_S = 1.0
_CPU = torch.device("cpu")


@final
class BackgroundQueue:
    """Queue of functions, which a daemon thread runs in order. An idle thread ends; the next `submit` starts another.

    Args:
        name: Name of the thread.
        stop: Called when the process ends, to end the running function. Must return at once.

    >>> background = BackgroundQueue("raydist-example", lambda: None)
    >>> background.submit(lambda: None).result()
    """

    def __init__(self, name: str, stop: Callable[[], object]) -> None:
        self._name = name
        self._stop = stop
        self._functions: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[[], None]) -> Future[None]:
        """Add a function to the queue. Does not block; the future holds the function's error."""
        future: Future[None] = Future()
        with self._lock:
            self._functions.put((function, future))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                end_at_exit(self._thread, self._stop)
                self._thread.start()
        return future

    def _run(self) -> None:
        while (submitted := self._next()) is not None:
            function, future = submitted
            try:
                function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            del function, future, submitted

    def _next(self) -> tuple[Callable[[], None], Future[None]] | None:
        with contextlib.suppress(queue.Empty):
            return self._functions.get(timeout=_IDLE_S)
        with self._lock:
            if not self._functions.empty():
                return self._functions.get_nowait()
            self._thread = None
        return None


@final
class PointToPoint:
    """The messages of one rank. Messages between two ranks arrive in the order in which they are sent.

    Args:
        membership: Membership of the rank, with the address of the rendezvous store.
        timeout_s: Limit of every wait, in seconds.
        check: Called with the operation and the other rank during a wait; may raise an error to end the wait.
    """

    def __init__(self, membership: Membership, timeout_s: float, check: Callable[[str, int], None]) -> None:
        self._membership = membership
        self._timeout_s = timeout_s
        self._check = check
        self._pairs: dict[int, _Pair] = {}

    def send(self, tensor: torch.Tensor, destination: int) -> Work:
        """Start to send a tensor. Does not block."""
        pair, data = self._pair(destination), stage_bytes(tensor).carrier
        said = describe_tensor(tensor)
        name = f"send(to={destination})"
        return self._work(name, destination, pair.sending.submit(lambda: pair.send(said, data)))

    def recv(self, tensor: torch.Tensor, source: int) -> Work:
        """Start to receive into a tensor. Does not block."""
        pair, staged = self._pair(source), stage_bytes(tensor)
        said = describe_tensor(tensor)

        def receive() -> None:
            pair.recv(said, staged.carrier)
            staged.deliver()

        return self._work(f"recv(from={source})", source, pair.receiving.submit(receive))

    def close(self) -> None:
        """Close all connections; pending messages end with an error. May be called twice."""
        for pair in self._pairs.values():
            pair.close()

    def _pair(self, peer: int) -> _Pair:
        mine = self._membership.rank
        if peer == mine:
            raise InvalidArgumentError(f"A message must go to another rank, got {peer}, which is this one. Copy it.")
        if peer not in self._pairs:
            low, high = sorted((mine, peer))
            name = f"{self._membership.group}/messages-{low}-{high}"
            place = replace(self._membership, group=name, rank=int(mine > peer), world_size=2, hosts=())
            self._pairs[peer] = _Pair(place, (mine, peer), self._timeout_s)
        return self._pairs[peer]

    def _work(self, name: str, peer: int, future: Future[None]) -> Work:
        return _Message(self._membership, name, peer, future, self._timeout_s, lambda: self._check(name, peer))


@final
class _Pair:
    """The connection between two ranks. The first send or recv connects."""

    def __init__(self, membership: Membership, ranks: tuple[int, int], timeout_s: float) -> None:
        mine, peer = ranks
        self._ranks = ranks
        self._place = 1 - membership.rank
        self._connection: Communicator = (gloo := GlooBackend().communicator(membership, _CPU, timeout_s))
        self._start: Callable[[], None] | None = gloo.start
        self._lock = threading.Lock()
        self.sending = BackgroundQueue(f"raydist-send-{mine}-{peer}", self._connection.abort)
        self.receiving = BackgroundQueue(f"raydist-receive-{peer}-{mine}", self._connection.abort)

    def send(self, said: str, data: torch.Tensor) -> None:
        """Send a header and bytes."""
        header = torch.zeros(_HEADER_BYTES, dtype=torch.uint8)
        text = f"{data.numel()}\n{said}".encode()[:_HEADER_BYTES]
        header[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._connected()
        works = [self._locked(self._connection.send, part) for part in (header, data)]
        for work in works:
            work.wait()

    def recv(self, said: str, data: torch.Tensor) -> None:
        """Receive a header and bytes; raise an error if the header differs from `said`."""
        self._connected()
        header = torch.zeros(_HEADER_BYTES, dtype=torch.uint8)
        self._locked(self._connection.recv, header).wait()
        length, theirs = bytes(header.tolist()).rstrip(b"\0").decode(errors="replace").split("\n", 1)
        fits = int(length) == data.numel() and said.startswith(theirs)
        # Receive a mismatched message as well, so that the next `recv` does not get it.
        self._locked(self._connection.recv, data if fits else torch.empty(int(length), dtype=torch.uint8)).wait()
        if not fits:
            raise CollectiveMismatchError(
                f"A message must have one shape and dtype on both ends, got {said} on rank {self._ranks[0]} for "
                f"{theirs} from rank {self._ranks[1]}."
            )

    def close(self) -> None:
        """Abort pending messages and end the threads."""
        self._connection.abort()
        self._connection.close()

    def _connected(self) -> None:
        with self._lock:
            if self._start is not None:
                self._start()
                self._start = None

    def _locked(self, start: Callable[[torch.Tensor, int], Work], data: torch.Tensor) -> Work:
        with self._lock:
            return start(data, self._place)


@final
class _Message(Work):
    """A pending message."""

    def __init__(
        self,
        membership: Membership,
        name: str,
        peer: int,
        future: Future[None],
        limit_s: float,
        check: Callable[[], None],
    ) -> None:
        self._membership = membership
        self._name = name
        self._peer = peer
        self._future = future
        self._limit_s = limit_s
        self._check = check

    def wait(self, timeout_s: float | None = None) -> None:
        limit_s = self._limit_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        while not self._future.done():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise self._late(limit_s)
            if not futures.wait([self._future], min(_SLICE_S, left_s)).done:
                self._check()
        error = self._future.exception()
        if error is None:
            return
        self._check()
        if isinstance(error, DeadlineExceededError):
            raise self._late(limit_s) from error
        if isinstance(error, UnavailableError):
            what = describe_operation(self._membership, self._name)
            raise UnavailableError(f"{what} failed: the connection to rank {self._peer} is lost.") from error
        raise error

    def _late(self, limit_s: float) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"{describe_operation(self._membership, self._name)} timed out after {limit_s} s. No sign of rank "
            f"{self._peer}. Wait again, or raise the limit (Timeouts.collective_s) if that rank is only slow."
        )
