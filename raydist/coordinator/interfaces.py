"""Interfaces between the coordinator and its workers and servers. Production uses Ray actors; tests use threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from raydist.actors.worker_actors import WorkerCall
from raydist.replicas.step import ReplicaSetup


class WorkerConnections(Protocol):
    """Connections to the workers. Implementation: `actors.worker_actors.WorkerActors`."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the workers, for messages; the `actor` of an UnavailableError is the name of the dead worker."""

    def begin(self, worker: int, make_runner: Callable[..., Any], *args: Any) -> tuple[WorkerCall, WorkerCall]:
        """Create the runner in a worker's process; return the pending answers for its versions and for its start."""

    def replace(self, worker: int) -> None:
        """Start another process for a worker; the caller then calls `begin`."""

    def send(self, worker: int, message: Any, objects: Sequence[Any]) -> WorkerCall:
        """Send closures to a worker."""

    def call(self, worker: int, method: str, *args: Any) -> WorkerCall:
        """Call a method of a worker's runner, after all messages sent before."""

    def announce(self) -> None:
        """Wake up `await_news`. Thread-safe."""

    def await_news(self, within_s: float) -> None:
        """Block until an answer has arrived, `announce` was called, or `within_s` has passed."""


class ServerSide(Protocol):
    """The driver's interface to the parameter servers, which hold the variables."""

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
        """Delete objects that the program has dropped and that no worker will ask for."""

    def fence(self, worker: int, generation: int) -> None:
        """Refuse all further requests of a dead worker's process."""

    def finish(self) -> None:
        """Apply incomplete synchronous steps: their missing gradients will not arrive."""
