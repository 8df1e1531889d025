"""An actor that does one thing in a thread, for as long as it is let, and tells what comes of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, final

import ray

from raydist.actors.class_tracking import cloudpickle
from raydist.actors.portable_errors import pack_error
from raydist.actors.supervision import RemoteFailure, kill_actors, translate_ray_error
from raydist.cluster import connect

__all__ = ["BackgroundActor", "BackgroundHost", "BackgroundWork"]

BackgroundWork = Callable[[Callable[[], bool], Callable[[Any], None]], None]
"""Called with a function that says whether to stop, and one that takes what is to be told."""

_ANSWER_S = 60.0  # Ray starts a process and imports torch first


@final
class BackgroundHost:
    """Runs inside the actor."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._told: list[Any] = []
        self._error: BaseException | None = None
        self._ended = threading.Event()

    def start(self, work: bytes) -> None:
        """Begin; returns at once."""
        threading.Thread(target=self._work, args=(work,), name="raydist-background", daemon=True).start()

    def _work(self, work: bytes) -> None:
        try:
            cloudpickle.loads(work)(self._stop.is_set, self._told.append)
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def news(self, known: int) -> tuple[bool, Sequence[Any]]:
        """Whether it has ended, and what was told since `known` things were; raises what it has ended by."""
        ended = self._ended.is_set()
        if self._error is not None:
            raise RemoteFailure(pack_error(self._error)) from None
        return ended, self._told[known:]

    def stop(self, limit_s: float) -> bool:
        """Let it end; whether it did within so many seconds."""
        self._stop.set()
        return self._ended.wait(limit_s)


@final
class BackgroundActor:
    """The driver's end. Threads may not share it.

    Args:
        work: What it does; sent by value.
        name: For Ray's dashboard and for messages.
        resources: Ray resources of the actor: {"CPU": 1}.
    """

    def __init__(self, work: BackgroundWork, name: str, resources: dict[str, float]) -> None:
        self._packed = cloudpickle.dumps(work)
        self._name = name
        self._resources = dict(resources)
        self._actor: Any = None

    def start(self) -> None:
        """Start the actor and begin. Waits until it has begun."""
        connect()
        cpus = self._resources.pop("CPU", 0)
        # Two threads: who asks for news does not wait for `stop`.
        options = {"num_cpus": cpus, "resources": self._resources, "max_concurrency": 2, "max_restarts": 0}
        self._actor = ray.remote(BackgroundHost).options(**options).remote()
        self._ask("start", self._packed)

    def news(self, known: int) -> tuple[bool, Sequence[Any]]:
        """See `BackgroundHost.news`."""
        ended, told = self._ask("news", known)
        return bool(ended), told

    def stop(self, limit_s: float) -> None:
        """End it, by force after so many seconds. May be called twice."""
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
