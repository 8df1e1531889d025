"""Actors of parameter servers: start them, call them, read their statistics, kill them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup

from raydist.actors.reservations import bundle_options
from raydist.actors.server_host import PackedTensor, ServerHost
from raydist.actors.software import installed_software, require_same_software
from raydist.actors.supervision import RemoteFailure, kill_actors, wait_for_all
from raydist.parameter_servers.connection import (
    PendingAnswer,
    RequestHandler,
    ServerConnection,
    Targets,
    copy_to_targets,
    pulled_by,
    server_is_gone,
    server_is_late,
)
from raydist.parameter_servers.requests import ServerAnswer, ServerRequest
from raydist.ray_session import RaySession

__all__ = ["RayConnection", "ServerActors", "ServerSeat"]


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

    def ask(
        self, request: ServerRequest, tensors: Sequence[torch.Tensor] = (), into: Targets | None = None
    ) -> PendingAnswer:
        """Send a request without waiting; implements `ServerConnection.ask`."""
        packed = [PackedTensor.of(tensor) for tensor in tensors]  # Ray copies the bytes before `remote` returns
        try:
            ref = self.handle.ask.remote(request, packed, self.limit_s)
        except RayActorError:
            raise server_is_gone(self.name) from None
        return _PendingCall(self.name, ref, pulled_by(request), into)


@final
@dataclass(frozen=True, slots=True)
class _PendingCall:
    name: str
    ref: Any
    numbers: tuple[int, ...]
    into: Targets | None

    def answer(self, timeout_s: float) -> tuple[ServerAnswer, Sequence[torch.Tensor]]:
        try:
            answer, packed = ray.get(self.ref, timeout=timeout_s)
        except GetTimeoutError:
            raise server_is_late(self.name, timeout_s) from None
        except RayActorError:
            raise server_is_gone(self.name) from None
        except RayTaskError as error:
            raise _cause_of(error) from None
        tensors = [each.tensor() for each in packed]
        if self.into is None or not self.numbers:
            return answer, tensors
        copy_to_targets(self.into, self.numbers, tensors)
        return answer, ()


def _cause_of(error: RayTaskError) -> Exception:
    cause = error.cause
    return cause.portable.restore() if isinstance(cause, RemoteFailure) else error


_SPARE_THREADS = 4  # for the driver and for metrics, in addition to one thread for each worker that may wait


@final
@dataclass(frozen=True, slots=True)
class ServerSeat:
    """The reservation bundle and node of one server's process.

    Attributes:
        bundle: Index of the bundle in the reservation.
        host: Name of the node, for messages; empty if unknown.
    """

    bundle: int
    host: str = ""


@final
class ServerActors:
    """The server actors of one strategy. The constructor starts their processes; the actors are not detached.

    Args:
        group: The placement group, which the caller still owns.
        seats: The bundle and node of each server.
        name: Name of the strategy.
        resources: Resources that each server takes from its bundle: "CPU", "GPU", "memory" in bytes, and others.
        num_workers: Number of workers that may have a request under way.
        limit_s: Seconds that an answer may take (`Timeouts.collective_s`).
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
        self.names = tuple(_title(number, name, seat) for number, seat in enumerate(seats))
        launch = functools.partial(_launch, group, resources, threads=num_workers + _SPARE_THREADS)
        self._handles = [launch(seat, f"{name}-server-{number}") for number, seat in enumerate(seats)]
        self._connections = tuple(
            RayConnection(handle, title, limit_s) for handle, title in zip(self._handles, self.names, strict=True)
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
    def connections(self) -> tuple[ServerConnection, ...]:
        """The connections to the servers, for any process."""
        self._session.require(f"The strategy {self._name}")
        return self._connections

    def kill(self) -> None:
        """Kill the actors. May be called twice."""
        handles, self._handles = self._handles, []
        if self._session.is_open:
            kill_actors(handles)


def _title(number: int, name: str, seat: ServerSeat) -> str:
    return f"parameter server {number} of {name}{f' on {seat.host}' if seat.host else ''}"


def _launch(group: PlacementGroup, wanted: Mapping[str, float], seat: ServerSeat, name: str, *, threads: int) -> Any:
    actor_class = ray.remote(concurrency_groups={"asks": threads})(ServerHost)  # type: ignore[call-overload]  # an option Ray leaves out
    return actor_class.options(**bundle_options(group, seat.bundle, wanted, name)).remote()
