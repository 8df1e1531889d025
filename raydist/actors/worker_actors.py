"""The workers of a coordinator: the driver calls each worker's actor separately, and answers arrive in any order.

One thread waits for the answers of all workers at once; a thread of Ray's announces each answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from raydist.actors.replica import ReplicaActors
from raydist.actors.supervision import translate_ray_error
from raydist.core.exception_utils import as_exception


@final
@dataclass(slots=True, eq=False)
class WorkerCall:
    """A call to one worker, and its answer once that arrives."""

    worker: int
    doing: str  # description of the call, for messages
    done: bool = False  # True once the worker has answered
    value: Any = None  # the answer
    # The error raised instead. UnavailableError with `actor` set to the worker's name: the worker is gone.
    error: Exception | None = None

    def settle(self, value: Any = None, error: Exception | None = None) -> None:
        self.value, self.error, self.done = value, error, True


@final
class WorkerActors:
    """The actors of a coordinator's workers. One thread waits; any thread may call.

    Args:
        actors: Handles of the actors, which this object owns from now on.
    """

    def __init__(self, actors: ReplicaActors) -> None:
        self._actors = actors
        self._changed = threading.Condition()
        self._num_news = 0

    @property
    def names(self) -> Sequence[str]:
        return self._actors.names

    def begin(self, worker: int, make_runner: Callable[..., Any], *args: Any) -> tuple[WorkerCall, WorkerCall]:
        """Create the runner in a worker's process; return the pending answers for its versions and for its start."""
        about = self._follow(WorkerCall(worker, "starting"), self._actors.about(worker))
        return about, self._follow(WorkerCall(worker, "starting"), self._actors.start(worker, make_runner, *args))

    def replace(self, worker: int) -> None:
        """Launch another process for a worker; call `begin` next."""
        self._actors.replace(worker)

    def send(self, worker: int, message: Any, objects: Sequence[Any]) -> WorkerCall:
        """Send closures to a worker without waiting."""
        return self._follow(WorkerCall(worker, "a closure"), self._actors.send(worker, message, objects))

    def call(self, worker: int, method: str, *args: Any) -> WorkerCall:
        """Call a method of a worker's runner after everything sent so far, without waiting."""
        return self._follow(WorkerCall(worker, method), self._actors.call(worker, method, *args))

    def _follow(self, asked: WorkerCall, ref: Any) -> WorkerCall:
        # Ray runs the callback in a thread of its own: the callback must not call Ray, and must return soon.
        ref.future().add_done_callback(lambda future: self._told(asked, future))
        return asked

    def _told(self, asked: WorkerCall, future: Any) -> None:
        try:
            error = future.exception()
            if error is None:
                asked.settle(future.result())
            else:
                asked.settle(error=self._translated(asked, as_exception(error)))
        except BaseException as error:  # the future was cancelled
            asked.settle(error=as_exception(error))
        self.announce()

    def _translated(self, asked: WorkerCall, error: Exception) -> Exception:
        return translate_ray_error(error, self.names[asked.worker], asked.doing)

    def announce(self) -> None:
        """Wake up `await_news`. Thread-safe."""
        with self._changed:
            self._num_news += 1
            self._changed.notify_all()

    def await_news(self, within_s: float) -> None:
        """Block until an answer has arrived, `announce` was called, or `within_s` seconds have passed."""
        with self._changed:
            if not self._num_news:
                self._changed.wait(within_s)
            self._num_news = 0

    def kill(self) -> None:
        """Kill all actors and release their reservation. May be called twice."""
        self._actors.kill()
