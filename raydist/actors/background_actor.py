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
"""A function of two callables: one returns True once the work should stop, the other reports a value."""

_ANSWER_S = 60.0  # Ray starts a process and imports torch first


@final
class BackgroundHost:
    """The side of a background actor that runs inside the actor process."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._told: list[Any] = []
        self._error: BaseException | None = None
        self._ended = threading.Event()

    def start(self, work: bytes) -> None:
        """Start the work in a thread and return at once."""
        threading.Thread(target=self._work, args=(work,), name="raydist-background", daemon=True).start()

    def _work(self, work: bytes) -> None:
        try:
            cloudpickle.loads(work)(self._stop.is_set, self._told.append)
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def news(self, known: int) -> tuple[bool, Sequence[Any]]:
        """Return (True once the work ended, the values reported after the first `known`). Raise the work's error."""
        ended = self._ended.is_set()
        if self._error is not None:
            raise RemoteFailure(pack_error(self._error)) from None
        return ended, self._told[known:]

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
        resources: Ray resources of the actor: {"CPU": 1}.
    """

    def __init__(self, work: BackgroundWork, name: str, resources: dict[str, float]) -> None:
        self._packed = cloudpickle.dumps(work)
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
        self._ask("start", self._packed)

    def news(self, known: int) -> tuple[bool, Sequence[Any]]:
        """Return the result of `BackgroundHost.news`. Block until the actor answers."""
        ended, told = self._ask("news", known)
        return bool(ended), told

    def stop(self, limit_s: float) -> None:
        """Stop the work, wait for its end for up to `limit_s`, and kill the actor. May be called twice."""
        actor, self._actor = self._actor, None
        if actor is None:
            return
        try:
            ray.get(actor.stop.remote(limit_s), timeout=limit_s + _ANSWER_S)
        except ray.exceptions.RayError:
            return  # it is gone already
        finally:
            kill_actors([actor])

    def _ask(self, method: str, *args: Any) -> Any:
        try:
            return ray.get(getattr(self._actor, method).remote(*args), timeout=_ANSWER_S)
        except Exception as error:
            raise translate_ray_error(error, self._name, method) from None
