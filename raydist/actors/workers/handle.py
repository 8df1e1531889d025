"""The pool's handle of one InputWorker actor: the blocks and stages it was sent, and its state."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, final

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raydist.actors.reservations import resource_options
from raydist.actors.supervision import first_line, kill_actors, wait_for
from raydist.actors.version_check import installed_packages
from raydist.actors.workers.worker import ExitReasonFile, InputWorker
from raydist.cluster.ray_session import RaySession
from raydist.cluster.reservation import captured_group
from raydist.core.errors import CancelledError, DeadlineExceededError, FailedPreconditionError, UnavailableError
from raydist.core.fork_guard import OwningProcess
from raydist.pipelines.elements.blocks import Block

_MOST = 20  # in a row: if every second start is killed from outside, this happens once in a million
_MOST_ERRORS = 3  # errors of the worker's constructor, which will repeat
_OWN_ERROR = "creation task"  # part of Ray's message for an error of the constructor


@final
class FailedStarts:
    """The number of a pool's workers that died in a row while they started."""

    def __init__(self) -> None:
        self._num = 0

    def end(self) -> None:
        """Reset the count because a worker runs."""
        self._num = 0

    def add(self, worker: str, error: Exception) -> None:
        """Count a worker that died before it ran.

        Raises:
            UnavailableError: Too many workers in a row died.
        """
        self._num += 1
        if self._num < (_MOST_ERRORS if _OWN_ERROR in str(error) else _MOST):
            return
        raise UnavailableError(
            f"Input worker {worker} is gone while starting, as were the {self._num - 1} before it: {first_line(error)} "
            "Their processes may have been killed, or have run out of memory. Iterate again, or load the last saved "
            "state.",
            actor=worker,
        ) from error


KEPT_STAGES = 64
"""Number of stages that a worker keeps; every epoch of a `repeat` has its own stages."""


@final
@dataclass(frozen=True, slots=True)
class WorkerKind:
    """The settings that all workers of one pool share.

    Attributes:
        resources: Ray resources of each worker; empty: workers share the cores with other processes.
        node_ids: Ray nodes to run on, round robin; empty for any node. With several, a dead node is skipped.
        memory_bytes: Memory that a worker may use beyond its memory at start; None for the free memory at that time.
        start_s: Limit for the start of a worker in seconds.
    """

    resources: Mapping[str, float] = field(default_factory=dict)
    node_ids: tuple[str, ...] = ()
    memory_bytes: int | None = None
    start_s: float = 120.0

    def start(self, name: str, number: int = 0) -> Any:
        """Create the actor with this number in the pool. Does not wait for its start."""
        node, soft = None, False
        if self.node_ids:
            node_id, soft = self.node_ids[number % len(self.node_ids)], len(self.node_ids) > 1
            node = NodeAffinitySchedulingStrategy(node_id, soft=soft)
        options = {
            "name": name,
            **resource_options(self.resources),
            # Ray 2.60 ignores the soft affinity of an actor without resources: one byte of memory is enough.
            "memory": self.resources.get("memory", 1 if soft else None),
            "scheduling_strategy": node,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        limit = self.memory_bytes or self.resources.get("memory")
        try:
            return ray.remote(InputWorker).options(**options).remote(name, None if limit is None else int(limit))
        except ValueError as error:  # Ray compares the request with the bundles of a captured group
            if captured_group() is None:
                raise
            raise FailedPreconditionError(
                "An input worker must fit in a bundle of the placement group that captures the children of the "
                f"strategy's actor, got resources_per_input_worker={dict(self.resources)}: {first_line(error)} Give "
                "the group a bundle for each input worker, or ask for less."
            ) from error


@final
class WorkerHandle:
    """An actor and its unfinished blocks, oldest first. The pool's lock guards every method but :meth:`await_start`.

    Attributes:
        name: Name of the actor.
        started: True once the actor has answered.
        node: Ray node of the actor; "" before it has answered.
        exit_reason: The exit reason that the actor's process writes if its own code ends it.
    """

    def __init__(self, name: str, kind: WorkerKind, actor: Any) -> None:
        self.name = name
        self.started = False
        self.node = ""
        self.exit_reason = ExitReasonFile()
        self._process = OwningProcess("An input worker")
        self._session = RaySession()
        self._kind = kind
        self._actor = actor
        self._ready: Any = actor.hello.remote(self.exit_reason.path, installed_packages())
        self._where: Any = actor.node.remote()
        self._ran = False
        self._under_way: deque[Any] = deque()
        self._digests: deque[bytes] = deque()

    @classmethod
    def start(cls, name: str, kind: WorkerKind, number: int = 0) -> Self:
        """Start a new actor with this number in the pool. Does not wait for its start."""
        return cls(name, kind, kind.start(name, number))

    @property
    def under_way(self) -> tuple[Any, ...]:
        """References to the results of the blocks that `forget_finished` has not removed."""
        return tuple(self._under_way)

    @property
    def reachable(self) -> bool:
        """Return True while the actor's Ray session is open."""
        return self._session.is_open

    @property
    def runs(self) -> bool:
        """Return True once the actor's process has started. Asks Ray without blocking until then."""
        if not self._ran and self._ready is not None:
            self._ran = bool(ray.wait([self._ready], timeout=0, fetch_local=False)[0])
        return self._ran or self.started

    def forget_finished(self, finished: set[Any]) -> int:
        """Remove the `finished` blocks; return the number of unfinished blocks."""
        while self._under_way and self._under_way[0] in finished:
            self._under_way.popleft()
        return len(self._under_way)

    def run(self, digest: bytes, stage: bytes, block: Block, starts: tuple[int, ...]) -> tuple[Any, Any]:
        """Send a block, with the stage if the actor does not have it.

        Returns:
            The references to the answer and to the stored columns; the answer's is among those `under_way`.
        """
        call = self._actor.run.options(num_returns=2)
        answer, stored = call.remote(digest, self._unknown(digest, stage), block, starts)
        self._under_way.append(answer)
        return answer, stored

    def _unknown(self, digest: bytes, stage: bytes) -> bytes | None:
        """Return the stage's pickle if the worker does not have the stage yet, else None."""
        if digest in self._digests:
            return None
        self._learn(digest)
        return stage

    def _learn(self, digest: bytes) -> None:
        self._digests.append(digest)
        if len(self._digests) > KEPT_STAGES:
            self._actor.forget.remote([self._digests.popleft()])

    def await_start(self, cancelled: Callable[[], bool]) -> None:
        """Block until the actor runs, for at most `start_s` seconds.

        Raises:
            RayActorError: The actor died before it ran.
            CancelledError: `cancelled()` returned True.
            DeadlineExceededError: The actor did not start in time.
            UnavailableError: The actor's constructor failed.
        """
        self._session.require(f"Input worker {self.name}")
        ready = self._ready
        if ready is None:
            return
        if not wait_for(ready, self._kind.start_s, cancelled, actor=self.name):
            raise DeadlineExceededError(
                f"Input worker {self.name} must start within {self._kind.start_s:g} s (Timeouts.start_s), and has "
                f"not. It asks for {dict(self._kind.resources) or 'no resources'}: the cluster may have nothing left."
            )
        try:
            ray.get(ready)
            self.node = ray.get(self._where, timeout=self._kind.start_s)
        except RayError as error:
            if cancelled():
                raise CancelledError(
                    f"The pool of input worker {self.name} was closed while that started. Take a new iterator to go on."
                ) from None
            if isinstance(error, RayActorError):
                raise
            raise UnavailableError(
                f"Input worker {self.name} cannot start: {first_line(error)} Iterate again, or load the last saved "
                "state.",
                actor=self.name,
            ) from error
        self._ready, self.started = None, True

    def block_at_work(self) -> Any:
        """Return the result reference of the block on which a dead worker died; None if it had finished all blocks."""
        for ref in self._under_way:
            try:
                ray.get(ref, timeout=0)
            except RayActorError:
                return ref
            except RayError:  # finished with an error
                continue
        return None

    def kill(self) -> None:
        """End the actor at once. Does nothing in a forked child, which has a copy of the handle."""
        if self._process.is_this and self._session.is_open:
            kill_actors([self._actor])
