"""Workers in actors: the driver calls each worker separately, and answers arrive in any order.

One thread waits for the answers of all workers at once; a thread of Ray's announces each answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, final

from raydist.actors.replica import ReplicaActors
from raydist.actors.supervision import translate_ray_error
from raydist.core.exception_utils import as_exception


@final
class Asked:
    """A call to one worker, and its answer once that arrives.

    Attributes:
        worker: Number of the worker.
        doing: Description of the call, for messages.
        done: True once the worker has answered.
        value: The answer.
        error: The error raised instead. UnavailableError with `actor` set to the worker's name: the worker is gone.
    """

    __slots__ = ("doing", "done", "error", "value", "worker")

    def __init__(self, worker: int, doing: str) -> None:
        self.worker = worker
        self.doing = doing
        self.done = False
        self.value: Any = None
        self.error: Exception | None = None

    def settle(self, value: Any = None, error: Exception | None = None) -> None:
        self.value, self.error, self.done = value, error, True


@final
class WorkerActors:
    """The actors of several workers. One thread waits; any thread may call.

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

    def begin(self, worker: int, make_runner: Callable[..., Any], *args: Any) -> tuple[Asked, Asked]:
        """Create the runner in a worker's process; return the pending answers for its versions and for its start."""
        about = self._follow(Asked(worker, "starting"), self._actors.about(worker))
        return about, self._follow(Asked(worker, "starting"), self._actors.start(worker, make_runner, *args))

    def replace(self, worker: int) -> None:
        """Launch another process for a worker; call `begin` next."""
        self._actors.replace(worker)

    def send(self, worker: int, message: Any, objects: Sequence[Any]) -> Asked:
        """Send closures to a worker without waiting."""
        return self._follow(Asked(worker, "a closure"), self._actors.send(worker, message, objects))

    def call(self, worker: int, method: str, *args: Any) -> Asked:
        """Call a method of a worker's runner after everything sent so far, without waiting."""
        return self._follow(Asked(worker, method), self._actors.call(worker, method, *args))

    def _follow(self, asked: Asked, ref: Any) -> Asked:
        # Ray runs the callback in a thread of its own: the callback must not call Ray, and must return soon.
        ref.future().add_done_callback(lambda future: self._told(asked, future))
        return asked

    def _told(self, asked: Asked, future: Any) -> None:
        try:
            error = future.exception()
            if error is None:
                asked.settle(future.result())
            else:
                asked.settle(error=self._translated(asked, as_exception(error)))
        except BaseException as error:  # the future was cancelled
            asked.settle(error=as_exception(error))
        self.announce()

    def _translated(self, asked: Asked, error: Exception) -> Exception:
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
