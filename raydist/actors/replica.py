"""The actors around replicas: thin shells that host a runner each and pass calls on to it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raydist.actors.portable_errors import pack_error
from raydist.actors.reservation_guard import guard_reservation
from raydist.actors.supervision import RemoteFailure, done_before_failure, kill_actors, wait_for_all
from raydist.actors.workers.kept_pages import keep_pages
from raydist.cluster import release
from raydist.ray_session import RaySession

__all__ = ["ReplicaActors", "ReplicaHost"]

_DISCARD_S = 1.0  # refused steps answer at once; what does not is killed soon


@final
class ReplicaHost:
    """Hosts one runner. `steps` and `call` run in the order of their submission, `control` beside them.

    Args:
        env: Environment variables for this process.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        # Libraries read these when they are imported, which is later. A runtime_env would do the same, but no process
        # that Ray holds ready has it: replicas would wait a second longer for new ones.
        os.environ.update(env or {})
        keep_pages(None)  # activations and pieces of batches come and go with every step
        self._runner: Any = None

    def start(self, make_runner: Callable[..., Any], *args: Any) -> int:
        """Build the runner in this process; returns the process id."""
        with _errors_travel():
            self._runner = make_runner(*args)
        return os.getpid()

    def steps(self, group: Any, *objects: Any) -> Any:
        """Run some steps. `objects` were given as object refs: Ray has mapped them before this starts."""
        with _errors_travel():
            result = self._runner.steps(group, objects)
        if result.error is not None:
            raise RemoteFailure(pack_error(result.error), replace(result, error=None)) from None
        return result

    def call(self, method: str, *args: Any) -> Any:
        """A method of the runner, after every step dispatched before it."""
        with _errors_travel():
            return getattr(self._runner, method)(*args)

    @ray.method(concurrency_group="control")
    def control(self, method: str, *args: Any) -> Any:
        """A method of the runner that must not wait for steps: it runs in a thread of its own."""
        return getattr(self._runner, method)(*args)


@contextlib.contextmanager
def _errors_travel() -> Iterator[None]:
    """Ray loses exceptions that do not pickle well, and takes KeyboardInterrupt for a cancelled task."""
    try:
        yield
    except BaseException as error:
        raise RemoteFailure(pack_error(error)) from None


@final
class ReplicaActors:
    """The handles of one strategy's replica actors, in rank order. Constructing starts the actors' processes.

    The actors are not detached: they die with the driver, and with the placement group.
    """

    def __init__(
        self, group: PlacementGroup, resources: Sequence[Mapping[str, float]], *, name: str, env: Mapping[str, str]
    ) -> None:
        self._group = group
        self._session = RaySession()
        self._name = name
        self._guard = guard_reservation(group)
        self._handles = [_launch(group, rank, wanted, name, dict(env)) for rank, wanted in enumerate(resources)]
        self.names = tuple(f"replica {rank} of {name}" for rank in range(len(resources)))

    @property
    def reachable(self) -> bool:
        """Whether there is still the Ray that they are of."""
        return self._session.is_open

    def _handle(self, rank: int) -> Any:
        self._session.require(f"The strategy {self._name}")
        return self._handles[rank]

    def start(self, rank: int, make_runner: Callable[..., Any], *args: Any) -> Any:
        return self._handle(rank).start.remote(make_runner, *args)

    def steps(self, rank: int, group: Any, objects: Sequence[Any]) -> Any:
        return self._handle(rank).steps.remote(group, *objects)

    def call(self, rank: int, method: str, *args: Any) -> Any:
        return self._handle(rank).call.remote(method, *args)

    def control_all(self, method: str, *args: Any) -> None:
        """Call beside the running steps, without waiting for an answer."""
        for handle in self._handles if self.reachable else ():
            handle.control.remote(method, *args)

    def wait(self, refs: Sequence[Any], names: Sequence[str], **limits: Any) -> list[Any]:
        """See `supervision.wait_for_all`."""
        self._session.require(f"The strategy {self._name}")
        return wait_for_all(refs, names, **limits)

    def done_before_failure(self, refs: Sequence[Any]) -> list[Any]:
        """See `supervision.done_before_failure`."""
        return [done_before_failure(ref) if self.reachable else None for ref in refs]

    def are_ready(self, refs: Sequence[Any], within_s: float) -> bool:
        """Whether all of `refs` are there, with values or errors; waits up to `within_s`."""
        if not self.reachable:
            return True  # as errors
        return len(ray.wait(list(refs), num_returns=len(refs), timeout=within_s)[0]) == len(refs)

    def silent(self, within_s: float) -> list[str]:
        """Names of those whose process does not even answer beside its steps; waits up to `within_s`."""
        if not self.reachable:
            return []
        asked = {handle.control.remote("ping"): name for handle, name in zip(self._handles, self.names, strict=True)}
        return [asked[ref] for ref in ray.wait(list(asked), num_returns=len(asked), timeout=within_s)[1]]

    def discard(self, refs: Sequence[Any]) -> None:
        """Drop results unread; an error among those that are there is not logged as unhandled."""
        if not self.reachable:
            return
        for ref in ray.wait(list(refs), num_returns=len(refs), timeout=_DISCARD_S)[0]:
            with contextlib.suppress(Exception):
                ray.get(ref, timeout=0)

    def kill(self) -> None:
        """Kill the actors and give their reservation back. May be called twice."""
        handles, self._handles = self._handles, []
        if self.reachable:
            kill_actors(handles)
            release(self._group)
            kill_actors([] if self._guard is None else [self._guard])


def _launch(group: PlacementGroup, rank: int, wanted: Mapping[str, float], name: str, env: dict[str, str]) -> Any:
    decorate = ray.remote(concurrency_groups={"control": 1})  # type: ignore[call-overload]  # an option Ray leaves out
    actor_class = decorate(ReplicaHost)
    return actor_class.options(
        name=f"{name}-replica-{rank}",
        num_cpus=wanted.get("CPU", 0),
        num_gpus=wanted.get("GPU", 0),
        resources={key: amount for key, amount in wanted.items() if key not in ("CPU", "GPU")},
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank),
        max_restarts=0,
        max_task_retries=0,
    ).remote(env)
