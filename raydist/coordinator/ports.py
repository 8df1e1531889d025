"""What a coordinator works with, by what it needs of that: workers in actors in life, in threads in tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from raydist.replicas.step import ReplicaSetup

__all__ = ["Question", "ServerSide", "WorkerPort"]


class Question(Protocol):
    """What one worker was asked: see `actors.worker_actors.Asked`."""

    done: bool
    value: Any
    error: Exception | None


class WorkerPort(Protocol):
    """The way to the workers: see `actors.worker_actors.WorkerActors`."""

    @property
    def names(self) -> Sequence[str]:
        """Of the workers, for messages; UnavailableError has that of a dead one as its `actor`."""

    def begin(self, worker: int, make_runner: Callable[..., Any], *args: Any) -> tuple[Question, Question]:
        """Let a worker's process make its runner: what it will say of its software, and that it has started."""

    def replace(self, worker: int) -> None:
        """Have another process for a worker; `begin` comes next."""

    def send(self, worker: int, message: Any, objects: Sequence[Any]) -> Question:
        """Send closures."""

    def call(self, worker: int, method: str, *args: Any) -> Question:
        """Call a method of a worker's runner, after all that it was sent."""

    def announce(self) -> None:
        """End an `await_news`. Any thread may call this."""

    def await_news(self, within_s: float) -> None:
        """Return once an answer has come, `announce` was called, or after so many seconds."""


class ServerSide(Protocol):
    """Where the variables live, as the driver sees it."""

    def setup_of(self, worker: int, generation: int) -> ReplicaSetup:
        """What a worker's process is started with, for the so manieth time."""

    def plan(self, settled: Any) -> Any:
        """Where new variables are to lie.

        Args:
            settled: What `WorkerRules.settle` gave.
        """

    def accept(self, plan: Any) -> None:
        """The plan was carried out."""

    def drop(self, handles: Sequence[int]) -> None:
        """The program has dropped these objects, and no worker will ask for them any more."""

    def fence(self, worker: int, generation: int) -> None:
        """A worker's process is dead: nothing that it has asked for happens from now on."""

    def finish(self) -> None:
        """Apply what waits for gradients that will not come."""
