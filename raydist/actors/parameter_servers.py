"""Actors of parameter servers: started, called, counted, killed."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup

from raydist.actors.reservations import bundle_options
from raydist.actors.server_host import PackedTensor, ServerHost
from raydist.actors.software import installed_software, require_same_software
from raydist.actors.supervision import RemoteFailure, kill_actors, wait_for_all
from raydist.parameter_servers.desk import RequestHandler
from raydist.parameter_servers.lanes.lane_link import LaneDoor
from raydist.parameter_servers.link import Awaited, Into, ServerDoor, ServerLink, fill, gone, pulled_by, too_late
from raydist.parameter_servers.requests import ServerAnswer, ServerRequest, Statistics
from raydist.parameter_servers.server_stats import ServerStats
from raydist.ray_session import RaySession

__all__ = ["RayDoor", "ServerActors", "ServerSeat"]


@final
@dataclass(frozen=True, slots=True)
class RayDoor:
    """Opens a way through Ray.

    Attributes:
        handle: Of the server's actor.
        name: The server, for messages.
        limit_s: How long the server's process may hold a call.
    """

    handle: Any
    name: str
    limit_s: float

    def open(self) -> RayLink:
        """See `ServerDoor`."""
        return RayLink(self.handle, self.name, self.limit_s)


@final
class RayLink:
    """See `RayDoor` for the arguments; any number of threads may share it."""

    def __init__(self, handle: Any, name: str, limit_s: float) -> None:
        self.name = name
        self._handle = handle
        self._limit_s = limit_s

    def ask(self, request: ServerRequest, tensors: Sequence[torch.Tensor] = (), into: Into | None = None) -> Awaited:
        """See `ServerLink`."""
        packed = [PackedTensor.of(tensor) for tensor in tensors]
        try:
            ref = self._handle.ask.remote(request, packed, self._limit_s)
        except RayActorError:
            raise gone(self.name) from None
        return _AskedThere(self.name, ref, pulled_by(request), into)

    def close(self) -> None:
        """See `ServerLink`."""


@final
@dataclass(frozen=True, slots=True)
class _AskedThere:
    name: str
    ref: Any
    numbers: tuple[int, ...]
    into: Into | None

    def answer(self, timeout_s: float) -> tuple[ServerAnswer, Sequence[torch.Tensor]]:
        try:
            answer, packed = ray.get(self.ref, timeout=timeout_s)
        except GetTimeoutError:
            raise too_late(self.name, timeout_s) from None
        except RayActorError:
            raise gone(self.name) from None
        except RayTaskError as error:
            raise _cause_of(error) from None
        tensors = [each.tensor() for each in packed]
        if self.into is None or not self.numbers:
            return answer, tensors
        fill(self.into, self.numbers, tensors)
        return answer, ()


def _cause_of(error: RayTaskError) -> Exception:
    cause = error.cause
    return cause.portable.restore() if isinstance(cause, RemoteFailure) else error


_SPARE_THREADS = 4  # for the driver and for metrics, beside one for each worker that may wait


@final
@dataclass(frozen=True, slots=True)
class ServerSeat:
    """Where one server's process runs.

    Attributes:
        bundle: Number of the reservation's bundle that it is in.
        node_id: Ray's name for the node.
        host: The node's name, for messages; empty where nobody knows.
    """

    bundle: int
    node_id: str
    host: str = ""


@final
class ServerActors:
    """The servers of one strategy. Constructing starts their processes; they are not detached.

    Args:
        group: The reservation, which stays the caller's.
        seats: Of the servers.
        name: The strategy's.
        resources: What each takes of its bundle: "CPU", "GPU", "memory" in bytes, and others.
        num_workers: How many may have a request under way.
        limit_s: How long an answer may take (`Timeouts.collective_s`).
    """

    def __init__(
        self,
        group: PlacementGroup,
        seats: Sequence[ServerSeat],
        *,
        name: str,
        resources: Mapping[str, float],
        num_workers: int,
        limit_s: float,
    ) -> None:
        self._session = RaySession()
        self._name = name
        self._seats = tuple(seats)
        self._limit_s = limit_s
        self.names = tuple(_title(number, name, seat) for number, seat in enumerate(seats))
        launch = functools.partial(_launch, group, resources, threads=num_workers + _SPARE_THREADS)
        self._handles = [launch(seat, f"{name}-server-{number}") for number, seat in enumerate(seats)]
        self._links: tuple[RayLink, ...] = tuple(
            RayLink(handle, title, limit_s) for handle, title in zip(self._handles, self.names, strict=True)
        )

    def start(self, make_server: Callable[..., RequestHandler], *args: Any, within_s: float) -> list[int]:
        """Make the servers in their processes; returns the process ids. Blocks until all are there.

        Args:
            make_server: Makes one, of its number and `args`.
            *args: For all the same.
            within_s: How long that may take.

        Raises:
            UnavailableError: A process died.
            FailedPreconditionError: One runs other versions than this process.
            DeadlineExceededError: See `within_s`.
        """
        deadline = time.monotonic() + within_s
        found = self._await_start([handle.about.remote() for handle in self._handles], within_s)
        require_same_software(installed_software(), found, self.names)
        refs = [
            handle.start.remote(title, self._name, make_server, number, *args)
            for number, (handle, title) in enumerate(zip(self._handles, self.names, strict=True))
        ]
        return self._await_start(refs, max(deadline - time.monotonic(), 0.0))

    def _await_start(self, refs: Sequence[Any], within_s: float) -> list[Any]:
        return wait_for_all(
            refs,
            self.names,
            timeout_s=within_s,
            doing="starting parameter servers",
            limit="Timeouts.start_s",
            on_error=lambda: None,
        )

    @property
    def links(self) -> Sequence[ServerLink]:
        """The driver's way to each."""
        self._session.require(f"The strategy {self._name}")
        return self._links

    def doors(self, node_id: str) -> tuple[ServerDoor, ...]:
        """For one new process on a node, to be opened there: through shared memory to the servers of that node.

        Raises:
            UnavailableError: A server is gone.
        """
        self._session.require(f"The strategy {self._name}")
        here = [number for number, seat in enumerate(self._seats) if seat.node_id == node_id]
        tickets = wait_for_all(
            [self._handles[number].open_lane.remote() for number in here],
            [self.names[number] for number in here],
            timeout_s=self._limit_s,
            doing="opening a lane",
            limit="Timeouts.collective_s",
            on_error=lambda: None,
        )
        doors: list[ServerDoor] = [
            RayDoor(handle, name, self._limit_s) for handle, name in zip(self._handles, self.names, strict=True)
        ]
        for number, ticket in zip(here, tickets, strict=True):
            if ticket is not None:
                doors[number] = LaneDoor(ticket, doors[number])
        return tuple(doors)

    def statistics(self) -> list[ServerStats]:
        """What each has done so far."""
        asked = [link.ask(Statistics()) for link in self.links]
        return [each.answer(self._limit_s)[0].value for each in asked]

    def kill(self) -> None:
        """Kill the actors. May be called twice."""
        handles, self._handles = self._handles, []
        if self._session.is_open:
            stopping = [_quietly(handle) for handle in handles]
            with_answer = [ref for ref in stopping if ref is not None]
            if with_answer:
                ray.wait(with_answer, num_returns=len(with_answer), timeout=1.0)
            kill_actors(handles)


def _quietly(handle: Any) -> Any:
    try:
        return handle.stop.remote()
    except RayError:
        return None


def _title(number: int, name: str, seat: ServerSeat) -> str:
    return f"parameter server {number} of {name}{f' on {seat.host}' if seat.host else ''}"


def _launch(group: PlacementGroup, wanted: Mapping[str, float], seat: ServerSeat, name: str, *, threads: int) -> Any:
    actor_class = ray.remote(concurrency_groups={"asks": threads})(ServerHost)  # type: ignore[call-overload]  # an option Ray leaves out
    return actor_class.options(**bundle_options(group, seat.bundle, wanted, name)).remote()
