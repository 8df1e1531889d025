"""Interfaces between the coordinator and its workers and servers. Production uses Ray actors; tests use threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from raydist.actors.worker_actors import WorkerCall
from raydist.replicas.step import ReplicaSetup


class WorkerConnections(Protocol):
    """The connection to the workers: see `actors.worker_actors.WorkerActors`."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the workers, for messages; the `actor` of an UnavailableError is the name of the dead worker."""

    def begin(self, worker: int, make_runner: Callable[..., Any], *args: Any) -> tuple[WorkerCall, WorkerCall]:
        """Create a worker's runner. The first result answers with versions, the second once the runner has started."""

    def replace(self, worker: int) -> None:
        """Start another process for a worker; the caller then calls `begin`."""

    def send(self, worker: int, message: Any, objects: Sequence[Any]) -> WorkerCall:
        """Send closures."""

    def call(self, worker: int, method: str, *args: Any) -> WorkerCall:
        """Call a method of a worker's runner, after all messages sent before."""

    def announce(self) -> None:
        """End an `await_news`. Any thread may call this."""

    def await_news(self, within_s: float) -> None:
        """Block until an answer has come, `announce` was called, or `within_s` has passed."""


class RecoversServers(Protocol):
    """Replaces dead servers: see `coordinator.server_recovery.ServerRecovery`."""

    def is_loss(self, error: Exception) -> bool:
        """Return True for the error of a dead server that is to be replaced. Does not block."""

    def recover(self, error: Exception, coordinator: Any) -> tuple[int, ...]:
        """Start servers and workers again with saved values; return the version of each server's values. Blocks."""


class ServerSide(Protocol):
    """The driver's view of the parameter servers, where the variables live."""

    def setup_of(self, worker: int, generation: int) -> ReplicaSetup:
        """Return the setup of a worker's process in this generation."""

    def plan(self, specs: Any) -> Any:
        """Choose servers for new variables.

        Args:
            specs: The result of `WorkerRules.settle`.
        """

    def accept(self, plan: Any) -> None:
        """Record that a plan was carried out."""

    def drop(self, handles: Sequence[int]) -> None:
        """Drop objects that the program has dropped; no worker asks for them any more."""

    def fence(self, worker: int, generation: int) -> None:
        """Refuse all further requests of a dead worker's process."""

    def finish(self) -> None:
        """Apply incomplete synchronous steps, whose missing gradients will not come."""
