"""An actor that runs one function in a thread until it is stopped, and reports what the function produces."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, final

import ray

from raydist.actors.class_tracking import cloudpickle
from raydist.actors.portable_errors import pack_error
from raydist.actors.supervision import RemoteFailure, kill_actors, translate_ray_error
from raydist.cluster.nodes import connect

BackgroundWork = Callable[[Callable[[], bool], Callable[[Any], None]], None]
"""A function of two callables: the first returns True once the work should stop, the second reports a value."""

_ANSWER_S = 60.0  # includes the start of a process and the import of torch


@final
class BackgroundHost:
    """The class of the Ray actor, which runs the work in a thread."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._reported: list[Any] = []
        self._error: BaseException | None = None
        self._ended = threading.Event()

    def start(self, work: bytes) -> None:
        """Start the work in a thread and return at once."""
        threading.Thread(target=self._work, args=(work,), name="raydist-background", daemon=True).start()

    def _work(self, work: bytes) -> None:
        try:
            cloudpickle.loads(work)(self._stop.is_set, self._reported.append)
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def news(self, known: int) -> tuple[bool, Sequence[Any]]:
        """Return True once the work has ended, and the values after the first `known`. Raise the work's error."""
        ended = self._ended.is_set()
        if self._error is not None:
            raise RemoteFailure(pack_error(self._error)) from None
        return ended, self._reported[known:]

    def stop(self, limit_s: float) -> bool:
        """Ask the work to stop. Block for up to `limit_s`; return True if the work has ended by then."""
        self._stop.set()
        return self._ended.wait(limit_s)


@final
class BackgroundActor:
    """The driver's handle of a background actor. Not thread-safe.

    Args:
        work: The function that the actor runs; pickled by value.
        name: Name of the actor, for Ray's dashboard and for messages.
        resources: Ray resources of the actor, for example {"CPU": 1}.
    """

    def __init__(self, work: BackgroundWork, name: str, resources: dict[str, float]) -> None:
        self._pickled_work = cloudpickle.dumps(work)
        self._name = name
        self._resources = dict(resources)
        self._actor: Any = None

    def start(self) -> None:
        """Start the actor and its work. Block until the work has begun."""
        connect()
        cpus = self._resources.pop("CPU", 0)
        # Two threads, so that a call of `news` does not wait for `stop`.
        options = {"num_cpus": cpus, "resources": self._resources, "max_concurrency": 2, "max_restarts": 0}
        self._actor = ray.remote(BackgroundHost).options(**options).remote()
        self._call("start", self._pickled_work)

    def news(self, known: int) -> tuple[bool, Sequence[Any]]:
        """Return the result of `BackgroundHost.news`. Block until the actor answers."""
        ended, values = self._call("news", known)
        return bool(ended), values

    def stop(self, limit_s: float) -> None:
        """Stop the work, wait for its end for up to `limit_s`, and kill the actor. May be called twice."""
        actor, self._actor = self._actor, None
        if actor is None:
            return
        try:
            ray.get(actor.stop.remote(limit_s), timeout=limit_s + _ANSWER_S)
        except ray.exceptions.RayError:
            return  # the actor has died already
        finally:
            kill_actors([actor])

    def _call(self, method: str, *args: Any) -> Any:
        try:
            return ray.get(getattr(self._actor, method).remote(*args), timeout=_ANSWER_S)
        except Exception as error:
            raise translate_ray_error(error, self._name, method) from None
