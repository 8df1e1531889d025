"""Workers in actors: each is asked by itself, and what they answer comes in any order.

Whoever waits here waits for all of them at once: Ray tells of answers in a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, final

from raydist.actors.replica import ReplicaActors
from raydist.actors.supervision import translate_ray_error
from raydist.foreign_errors import as_exception

__all__ = ["Asked", "WorkerActors"]


@final
class Asked:
    """What one worker was asked.

    Attributes:
        worker: Its number.
        doing: What it is to do, for messages.
        done: Whether it has answered.
        value: The answer.
        error: What was raised in its place. UnavailableError with its name as `actor`: the worker is gone.
    """

    __slots__ = ("doing", "done", "error", "value", "worker")

    def __init__(self, worker: int, doing: str) -> None:
        self.worker = worker
        self.doing = doing
        self.done = False
        self.value: Any = None
        self.error: Exception | None = None

    def settle(self, value: Any = None, error: Exception | None = None) -> None:
        """It has answered."""
        self.value, self.error, self.done = value, error, True


@final
class WorkerActors:
    """The actors of some workers. One thread waits; any thread asks.

    Args:
        actors: Theirs, which belong to this object from now on.
    """

    def __init__(self, actors: ReplicaActors) -> None:
        self._actors = actors
        self._changed = threading.Condition()
        self._num_news = 0

    @property
    def names(self) -> Sequence[str]:
        """Of the workers, for messages."""
        return self._actors.names

    def begin(self, worker: int, make_runner: Callable[..., Any], *args: Any) -> tuple[Asked, Asked]:
        """Let a worker's process make its runner: what it will say of its software, and that it has started."""
        about = self._follow(Asked(worker, "starting"), self._actors.about(worker))
        return about, self._follow(Asked(worker, "starting"), self._actors.start(worker, make_runner, *args))

    def replace(self, worker: int) -> None:
        """Have another process for a worker; `begin` comes next."""
        self._actors.replace(worker)

    def send(self, worker: int, message: Any, objects: Sequence[Any]) -> Asked:
        """Send closures to a worker."""
        return self._follow(Asked(worker, "a closure"), self._actors.send(worker, message, objects))

    def call(self, worker: int, method: str, *args: Any) -> Asked:
        """Call a method of a worker's runner, after all that it was sent."""
        return self._follow(Asked(worker, method), self._actors.call(worker, method, *args))

    def _follow(self, asked: Asked, ref: Any) -> Asked:
        """Fill in an answer of Ray's when it comes."""
        # A thread of Ray's runs this: it must not call Ray, and end soon.
        ref.future().add_done_callback(lambda future: self._told(asked, future))
        return asked

    def _told(self, asked: Asked, future: Any) -> None:
        try:
            error = future.exception()
            if error is None:
                asked.settle(future.result())
            else:
                asked.settle(error=self._translated(asked, as_exception(error)))
        except BaseException as error:  # of a future that was cancelled
            asked.settle(error=as_exception(error))
        self.announce()

    def _translated(self, asked: Asked, error: Exception) -> Exception:
        return translate_ray_error(error, self.names[asked.worker], asked.doing)

    def announce(self) -> None:
        """End an `await_news`. Any thread may call this."""
        with self._changed:
            self._num_news += 1
            self._changed.notify_all()

    def await_news(self, within_s: float) -> None:
        """Return once an answer has come, `announce` was called, or after so many seconds."""
        with self._changed:
            if not self._num_news:
                self._changed.wait(within_s)
            self._num_news = 0

    def kill(self) -> None:
        """Kill them all, and give their reservation back. May be called twice."""
        self._actors.kill()
