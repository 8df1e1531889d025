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
from raydist.actors.supervision import RemoteFailure, done_before_failure, kill_actors, wait_for_all
from raydist.actors.workers.kept_pages import keep_pages
from raydist.cluster import release

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
        self._handles = [_launch(group, rank, wanted, name, dict(env)) for rank, wanted in enumerate(resources)]
        self.names = tuple(f"replica {rank} of {name}" for rank in range(len(resources)))

    def start(self, rank: int, make_runner: Callable[..., Any], *args: Any) -> Any:
        return self._handles[rank].start.remote(make_runner, *args)

    def steps(self, rank: int, group: Any, objects: Sequence[Any]) -> Any:
        return self._handles[rank].steps.remote(group, *objects)

    def call(self, rank: int, method: str, *args: Any) -> Any:
        return self._handles[rank].call.remote(method, *args)

    def control_all(self, method: str, *args: Any) -> None:
        """Call beside the running steps, without waiting for an answer."""
        for handle in self._handles:
            handle.control.remote(method, *args)

    def wait(self, refs: Sequence[Any], names: Sequence[str], **limits: Any) -> list[Any]:
        """See `supervision.wait_for_all`."""
        return wait_for_all(refs, names, **limits)

    def done_before_failure(self, refs: Sequence[Any]) -> list[Any]:
        """See `supervision.done_before_failure`."""
        return [done_before_failure(ref) for ref in refs]

    def are_ready(self, refs: Sequence[Any], within_s: float) -> bool:
        """Whether all of `refs` are there, with values or errors; waits up to `within_s`."""
        return len(ray.wait(list(refs), num_returns=len(refs), timeout=within_s)[0]) == len(refs)

    def discard(self, refs: Sequence[Any]) -> None:
        """Drop results unread; an error among those that are there is not logged as unhandled."""
        for ref in ray.wait(list(refs), num_returns=len(refs), timeout=_DISCARD_S)[0]:
            with contextlib.suppress(Exception):
                ray.get(ref, timeout=0)

    def kill(self) -> None:
        """Kill the actors and give their reservation back. May be called twice."""
        kill_actors(self._handles)
        self._handles = []
        release(self._group)


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
