"""Parameter servers in Ray actors: connections by actor calls, the actor itself with its metrics, and their start.

A server's process answers requests one at a time. `ServerActors` starts and ends the servers of one strategy.
"""

from __future__ import annotations

import functools
import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.metrics import Counter, Gauge

from raydist.actors.portable_errors import pack_error
from raydist.actors.reservations import bundle_options
from raydist.actors.supervision import RemoteFailure, first_line, kill_actors, title_of_this_actor, wait_for_all
from raydist.actors.version_check import Software, installed_software, require_same_software
from raydist.cluster.nodes import living_nodes
from raydist.cluster.ray_session import RaySession
from raydist.cluster.reservation import Reservation
from raydist.collectives.tensors import flat_bytes
from raydist.core.errors import FailedPreconditionError
from raydist.parameter_servers.connection import (
    PendingAnswer,
    RequestDispatcher,
    RequestHandler,
    ServerConnection,
    server_is_gone,
    server_is_late,
)
from raydist.parameter_servers.requests import ServerAnswer, ServerRequest, ServerStats, Statistics

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
# Arguments and results of up to 100 KB travel with a call; larger ones go through the object store, which takes 2 ms of
# the raylet's CPU time. So messages of up to 1 MiB are cut into pieces.
_PIECE, _IN_CALL = 90_000, 1 << 20
_Message = bytes | tuple[bytes, list[_Bytes]]


def pack_message(head: Any, tensors: Sequence[torch.Tensor], *, copy: bool = False) -> _Message:
    """Pack a request or an answer with its tensors: as few objects as possible, because Ray pickles each slowly.

    Args:
        head: The request or answer.
        tensors: Dense tensors on the CPU.
        copy: Copy the tensors, which may change before Ray has sent the message.
    """
    layout = [(each.dtype, tuple(each.shape)) for each in tensors]
    parts = [flat_bytes(each.detach()) for each in tensors]
    small = sum(map(len, parts)) <= _IN_CALL
    if len(parts) > 1 and (small or copy) and len({each.dtype for each in tensors}) == 1:
        parts = [torch.cat(parts)]
    elif copy and not small:
        parts = [each.clone() for each in parts]
    arrays = [each.numpy() for each in parts]
    if small:
        return pickle.dumps((head, layout, arrays), pickle.HIGHEST_PROTOCOL)
    return pickle.dumps((head, layout, None), pickle.HIGHEST_PROTOCOL), arrays


def unpack_message(pieces: Sequence[Any]) -> tuple[Any, list[torch.Tensor]]:
    """Undo `pack_message` and `_cut`. The tensors share the message's memory, and must not be written to."""
    pickled, mapped = pieces[0] if isinstance(pieces[0], tuple) else (b"".join(pieces), None)
    head, layout, arrays = pickle.loads(pickled)
    parts = [_tensor_of(each) for each in (arrays if mapped is None else mapped)]
    if len(parts) < len(layout):
        sizes = [dtype.itemsize * torch.Size(shape).numel() for dtype, shape in layout]
        parts = list(parts[0].split(sizes))
    return head, [part.view(dtype).view(shape) for part, (dtype, shape) in zip(parts, layout, strict=True)]


def _cut(message: _Message, count: int) -> list[Any]:
    """Cut a message into a number of pieces, some of which may be empty."""
    if isinstance(message, tuple):
        return [message, *[b""] * (count - 1)]
    size = -(-len(message) // count)
    return [message[begin : begin + size] for begin in range(0, size * count, size)] if size else [message] * count


def _num_pieces(num_bytes: int) -> int:
    return 1 if num_bytes > _IN_CALL else 1 + num_bytes // _PIECE


def _tensor_of(array: _Bytes) -> torch.Tensor:
    if not array.size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_ArrayView(array)))


@final
class _ArrayView:
    """A view of an array's memory that numpy takes for writable: torch warns of read-only arrays."""

    def __init__(self, array: _Bytes) -> None:
        self.array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


@final
@dataclass(frozen=True, slots=True)
class RayConnection:
    """A connection to a server through Ray actor calls; see `ServerConnection`.

    Attributes:
        handle: Handle of the server's actor.
        name: Name of the server, for messages.
        limit_s: Seconds for which the server's process may hold a call.
    """

    handle: Any
    name: str
    limit_s: float

    def ask(self, request: ServerRequest, tensors: Sequence[torch.Tensor] = (), answer_bytes: int = 0) -> PendingAnswer:
        """Send a request without waiting; implements `ServerConnection.ask`."""
        message = pack_message(request, tensors)
        pieces = _cut(message, _num_pieces(len(message)) if isinstance(message, bytes) else 1)
        count = _num_pieces(answer_bytes)
        ask = self.handle.ask if count == 1 else self.handle.ask.options(num_returns=count)
        try:  # Ray copies the pieces before `remote` returns
            refs = ask.remote(self.limit_s, count, *pieces)
        except RayActorError:
            raise server_is_gone(self.name) from None
        return _PendingCall(self.name, [refs] if count == 1 else refs)


@final
@dataclass(frozen=True, slots=True)
class _PendingCall:
    name: str
    refs: list[Any]

    def answer(self, timeout_s: float) -> tuple[ServerAnswer, Sequence[torch.Tensor]]:
        try:
            return unpack_message(ray.get(self.refs, timeout=timeout_s))
        except GetTimeoutError:
            raise server_is_late(self.name, timeout_s) from None
        except RayActorError:
            raise server_is_gone(self.name) from None
        except RayTaskError as error:
            cause = error.cause
            raise (cause.portable.restore() if isinstance(cause, RemoteFailure) else error) from None


_TAGS = ("strategy", "server")
_COUNTED = {
    "pulls": "Reads of values.",
    "pushes": "Changes applied.",
    "late": "Gradients dropped because they came after their step.",
    "bytes_pulled": "Bytes of values read.",
    "bytes_pushed": "Bytes of changes.",
    "apply_seconds": "Seconds spent in applying changes.",
}


@final
class ServerMetrics:
    """Metrics of one server, in the server's process. Names begin with `raydist_parameter_server_`.

    Args:
        strategy: Name of the strategy; a tag.
        server: Name of the server; a tag.
    """

    def __init__(self, strategy: str, server: str) -> None:
        self._tags = {"strategy": strategy, "server": server}
        self._before = ServerStats(0)
        self._counters: dict[str, Any] = {
            name: Counter(f"raydist_parameter_server_{name}", description=text, tag_keys=_TAGS)
            for name, text in _COUNTED.items()
        }
        self._held = Gauge(
            "raydist_parameter_server_bytes_held",
            description="Bytes of values, and of what optimizers remember.",
            tag_keys=_TAGS,
        )
        self._staleness = Counter(
            "raydist_parameter_server_staleness",
            description="Gradients applied, by how many changes came between their read and that.",
            tag_keys=(*_TAGS, "changes"),
        )

    def update(self, stats: ServerStats) -> None:
        """Update Ray's metrics to the server's current counts."""
        for name, counter in self._counters.items():
            _raise(counter, getattr(stats, name) - getattr(self._before, name), self._tags)
        self._held.set(stats.bytes_held, tags=self._tags)
        for changes, count in stats.staleness.items():
            tags = {**self._tags, "changes": staleness_bucket(changes)}
            _raise(self._staleness, count - self._before.staleness.get(changes, 0), tags)
        self._before = stats


def _raise(counter: Any, by: float, tags: Mapping[str, str]) -> None:
    if by > 0:  # Ray refuses 0
        counter.inc(by, tags=dict(tags))


def staleness_bucket(changes: int) -> str:
    """Return the label of the range that a staleness falls into. Each range is twice as wide as the previous one.

    >>> [staleness_bucket(changes) for changes in (0, 1, 2, 3, 4, 7, 8)]
    ['0', '1', '2-3', '2-3', '4-7', '4-7', '8-15']
    """
    if changes < 2:
        return str(max(changes, 0))
    first = 1 << (changes.bit_length() - 1)
    return f"{first}-{2 * first - 1}"


_PUBLISH_S = 5.0  # between two readings of the server's statistics, for Ray's metrics


@final
class ServerHost:
    """The actor that hosts one server. Each `ask` runs in a thread of its own; one thread runs all other methods."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._dispatcher: RequestDispatcher | None = None
        self._title = "a parameter server that was not started"
        self._replaced = threading.Event()
        self._shown = title_of_this_actor()

    def __repr__(self) -> str:
        return self._shown or type(self).__name__

    def about(self) -> Software:
        """Return the versions and devices of this process."""
        return installed_software()

    def start(self, title: str, strategy: str, make_server: Callable[..., RequestHandler], *args: Any) -> int:
        """Create the server, start to answer requests, and return the process id."""
        self._title = title
        try:
            dispatcher = self._dispatcher = RequestDispatcher(make_server(*args))
        except BaseException as error:
            raise RemoteFailure(pack_error(error)) from None
        self._replaced.set()
        self._replaced = threading.Event()
        publish = functools.partial(_publish, dispatcher, ServerMetrics(strategy, title), self._replaced)
        threading.Thread(target=publish, name="raydist-metrics", daemon=True).start()
        return os.getpid()

    @ray.method(concurrency_group="asks")
    def ask(self, limit_s: float, num_pieces: int, *pieces: Any) -> Any:
        """Return the server's answer in pieces. Blocks until the server answers, for `limit_s` at most."""
        try:
            answer = _cut(self._answer(*unpack_message(pieces), limit_s), num_pieces)
        except Exception as error:
            raise RemoteFailure(pack_error(error)) from None
        return answer[0] if num_pieces == 1 else answer

    def _answer(self, request: ServerRequest, tensors: Sequence[torch.Tensor], limit_s: float) -> _Message:
        if self._dispatcher is None:
            raise server_is_late(self._title, 0)
        future = self._dispatcher.submit(request, tensors, functools.partial(pack_message, copy=True))
        try:
            return future.result(limit_s)
        except TimeoutError:
            if future.done():
                raise  # the server's own
            raise server_is_late(self._title, limit_s) from None


def _publish(dispatcher: RequestDispatcher, metrics: ServerMetrics, ended: threading.Event) -> None:
    while not ended.wait(_PUBLISH_S):
        stats = dispatcher.submit(Statistics(), (), lambda answer, _: answer.value).result()
        if isinstance(stats, ServerStats):
            metrics.update(stats)


_SPARE_THREADS = 4  # for the driver and for metrics, in addition to one thread for each worker that may wait


@final
class ServerActors:
    """The server actors of one strategy. The constructor starts their processes; the actors are not detached.

    Args:
        reservation: The reserved bundles, which the caller still owns; its first bundles are those of the servers.
        nodes: Name of each server's node, for messages; empty if unknown.
        name: Name of the strategy.
        resources: Resources that each server takes from its bundle: "CPU", "GPU", "memory" in bytes, and others.
        num_workers: Number of workers that may have a request under way.
        limit_s: Seconds that an answer may take (`Timeouts.collective_s`).
    """

    def __init__(
        self,
        reservation: Reservation,
        nodes: Sequence[str],
        *,
        name: str,
        resources: Mapping[str, float],
        num_workers: int,
        limit_s: float,
    ) -> None:
        self._session = RaySession()
        self._reservation = reservation
        self._name = name
        self._limit_s = limit_s
        self._launch = functools.partial(_launch, reservation, resources, threads=num_workers + _SPARE_THREADS)
        self._num_restarts = 0
        self._made: tuple[Callable[..., RequestHandler], tuple[Any, ...]] | None = None
        self._handles = [self._launch(number, f"{name}-server-{number}") for number in range(len(nodes))]
        self._connect(nodes)

    def _connect(self, nodes: Sequence[str]) -> None:
        self.names = tuple(
            f"parameter server {number} of {self._name}{node and f' on {node}'}" for number, node in enumerate(nodes)
        )
        self._connections = tuple(
            RayConnection(handle, title, self._limit_s) for handle, title in zip(self._handles, self.names, strict=True)
        )

    def start(self, make_server: Callable[..., RequestHandler], *args: Any, within_s: float) -> list[int]:
        """Create the servers in their processes and return the process ids. Block until all servers are ready.

        Args:
            make_server: Creates one server; called with the server's number and `args`.
            *args: Further arguments, the same for all servers.
            within_s: Limit in seconds.

        Raises:
            UnavailableError: A process died.
            FailedPreconditionError: A server's process runs other versions than this process.
            DeadlineExceededError: The servers were not ready after `within_s`.
        """
        self._made = make_server, args
        return self._start(make_server, args, within_s, "Timeouts.start_s")

    def _start(
        self, make_server: Callable[..., RequestHandler], args: tuple[Any, ...], within_s: float, limit: str
    ) -> list[int]:
        deadline = time.monotonic() + within_s
        found = self._await_start([handle.about.remote() for handle in self._handles], within_s, limit)
        require_same_software(installed_software(), found, self.names)
        refs = [
            handle.start.remote(title, self._name, make_server, number, *args)
            for number, (handle, title) in enumerate(zip(self._handles, self.names, strict=True))
        ]
        return self._await_start(refs, max(deadline - time.monotonic(), 0.0), limit)

    def restart(self, within_s: float) -> None:
        """Kill all servers, and start others in their bundles, as `start` did. Blocks until they are ready.

        Raises:
            FailedPreconditionError: The servers were killed by `kill`.
            Exception: See `start`.
        """
        self._session.require(f"The strategy {self._name}")
        if not self._handles or self._made is None:
            raise FailedPreconditionError(f"{self._name} must be open to start its servers again, it was closed.")
        kill_actors(self._handles)
        self._num_restarts += 1
        again = f"again-{self._num_restarts}"
        self._handles = [self._launch(n, f"{self._name}-server-{n}-{again}") for n in range(len(self._handles))]
        self._start(*self._made, within_s, "FailureOptions.replace_s")
        hosts = [self._reservation.present_host(number) for number in range(len(self._handles))]
        nodes = {node.node_id: node.title for node in living_nodes()}
        self._connect([nodes.get(host, "") for host in hosts])

    def lost(self, within_s: float) -> list[str]:
        """Return a sentence about each server whose process is gone. Blocks for up to `within_s` seconds."""
        asked = [handle.about.remote() for handle in self._handles]
        ready = set(ray.wait(asked, num_returns=len(asked), timeout=within_s)[0]) if asked else set()
        found = []
        for name, ref in zip(self.names, asked, strict=True):
            try:
                if ref in ready:
                    ray.get(ref, timeout=0)
            except RayActorError as error:
                found.append(f"{name} is gone: {first_line(error).rstrip('.')}")
        return found

    def _await_start(self, refs: Sequence[Any], within_s: float, limit: str) -> list[Any]:
        return wait_for_all(
            refs,
            self.names,
            timeout_s=within_s,
            doing="starting parameter servers",
            limit=limit,
            on_error=lambda: None,
        )

    @property
    def connections(self) -> tuple[ServerConnection, ...]:
        self._session.require(f"The strategy {self._name}")
        return self._connections

    def kill(self) -> None:
        """Kill the actors. May be called twice."""
        handles, self._handles = self._handles, []
        if self._session.is_open:
            kill_actors(handles)


def _launch(reservation: Reservation, wanted: Mapping[str, float], bundle: int, name: str, *, threads: int) -> Any:
    actor_class = ray.remote(concurrency_groups={"asks": threads})(ServerHost)  # type: ignore[call-overload]  # an option Ray leaves out
    return actor_class.options(**bundle_options(reservation, bundle, wanted, name)).remote()
