"""A pool of InputWorker actors behind the executor port of the input engine."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections import deque
from collections.abc import Mapping
from typing import Any, final

import cloudpickle
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raydist.actors.input_worker import InputWorker, unpack_result
from raydist.cluster import connect
from raydist.errors import CancelledError, DeadlineExceededError, InvalidArgumentError, UnavailableError
from raydist.options import Options, Timeouts
from raydist.pipelines.blocks import Block
from raydist.pipelines.executor import Executor, Pending, StageResult, StageSpec
from raydist.pipelines.meters import Place

__all__ = ["ActorExecutor", "open_pool"]

_BLOCKS_PER_WORKER = 2  # one being worked on, one on its way
_KEPT_SPECS = 64  # stages that a worker keeps; every pass of a `repeat` has its own


@final
class _Worker:
    """One actor and what it was given: its blocks under way, oldest first, and the stages it knows."""

    def __init__(self, name: str, resources: Mapping[str, float], node_id: str | None) -> None:
        self.name = name
        others = {key: amount for key, amount in resources.items() if key not in ("CPU", "GPU")}
        node = None if node_id is None else NodeAffinitySchedulingStrategy(node_id, soft=False)
        actor: Any = (
            ray.remote(InputWorker)
            .options(
                name=name,
                num_cpus=resources.get("CPU", 0),
                num_gpus=resources.get("GPU", 0),
                resources=others,
                scheduling_strategy=node,
                max_restarts=0,
                max_task_retries=0,
            )
            .remote(name)
        )
        self.actor = actor
        self.ready = actor.hello.remote()
        self.under_way: deque[Any] = deque()
        self.digests: deque[bytes] = deque()

    def load(self) -> int:
        """Blocks that it has not finished."""
        while self.under_way and ray.wait([self.under_way[0]], timeout=0, fetch_local=False)[0]:
            self.under_way.popleft()
        return len(self.under_way)

    def run(self, digest: bytes, spec: bytes, block: Block, starts: tuple[int, ...]) -> Any:
        known = digest in self.digests
        if not known:
            self._learn(digest)
        ref = self.actor.run.remote(digest, None if known else spec, block, starts)
        self.under_way.append(ref)
        return ref

    def _learn(self, digest: bytes) -> None:
        self.digests.append(digest)
        if len(self.digests) > _KEPT_SPECS:
            self.actor.forget.remote([self.digests.popleft()])


@final
class _Task(Pending):
    """One block on one worker."""

    def __init__(self, executor: ActorExecutor, worker: _Worker, ref: Any, stage: str, limit_s: float) -> None:
        self._executor = executor
        self._worker = worker
        self._ref = ref
        self._stage = stage
        self._limit_s = limit_s

    def done(self) -> bool:
        return bool(ray.wait([self._ref], timeout=0, fetch_local=False)[0])

    def result(self) -> StageResult:
        self._executor.await_start(self._worker)
        try:
            return unpack_result(ray.get(self._ref, timeout=self._limit_s))
        except GetTimeoutError:
            raise DeadlineExceededError(
                f"Input worker {self._worker.name} must finish a block of stage {self._stage} within "
                f"{self._limit_s:g} s (Timeouts.element_s, for each block in its queue), and has not. Its function may "
                "be stuck; if it is only slow, raise the limit."
            ) from None
        except RayTaskError as error:  # what the worker made could not be sent
            raise _cause_of(error, self._worker.name, self._stage) from None
        except RayError as error:
            raise self._executor.explain(error, self._worker, f"running stage {self._stage}") from error


@final
class ActorExecutor(Executor):
    """Runs stages on a pool of actors, each block on the least loaded one. Used by one thread; `close` by any.

    Workers start with the first block. They die with the process that made the pool.

    Args:
        num_workers: Number of actors, >= 1.
        name: Prefix of their names.
        timeouts: `start_s` for their start, `element_s` for one block.
        resources: Ray resources of each; by default none (CPU 0): they share the cores with what runs beside them.
        node_id: Ray node to run on; None for any.
    """

    place: Place = "actors"

    def __init__(
        self,
        num_workers: int,
        *,
        name: str = "raydist",
        timeouts: Timeouts | None = None,
        resources: Mapping[str, float] | None = None,
        node_id: str | None = None,
    ) -> None:
        self.window = num_workers * _BLOCKS_PER_WORKER
        self.num_workers = num_workers
        self._name = f"{name}-{uuid.uuid4().hex[:8]}"
        self._timeouts = timeouts or Timeouts()
        self._resources = dict(resources or {})
        self._node_id = node_id
        self._workers: list[_Worker] = []
        self._pickled: dict[int, tuple[StageSpec, bytes, bytes]] = {}
        self._failure: Exception | None = None
        self._closed = False

    def submit(self, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> Pending:
        if self._closed:
            raise CancelledError("This pool of input workers is closed and takes no more work.")
        if self._failure is not None:
            raise self._failure
        if not self._workers:
            self._start()
        digest, data = self._pickle(spec)
        loads = [worker.load() for worker in self._workers]
        worker = self._workers[loads.index(min(loads))]
        limit_s = self._timeouts.element_s * (1 + min(loads))
        return _Task(self, worker, worker.run(digest, data, block, starts), spec.name, limit_s)

    def _start(self) -> None:
        self._workers = [
            _Worker(f"{self._name}-worker-{index}", self._resources, self._node_id) for index in range(self.num_workers)
        ]

    def _pickle(self, spec: StageSpec) -> tuple[bytes, bytes]:
        known = self._pickled.get(id(spec))
        if known is not None and known[0] is spec:
            return known[1], known[2]
        try:
            data: bytes = cloudpickle.dumps(spec)
        except Exception as error:
            labels = ", ".join(kernel.label for kernel in spec.kernels)
            raise InvalidArgumentError(
                f"Functions that run on input workers must be picklable, those of {labels} are not: "
                f"{type(error).__name__}: {error}. Open files, locks and connections inside the function, or set "
                "num_input_workers=0."
            ) from error
        digest = hashlib.blake2b(data, digest_size=16).digest()
        if len(self._pickled) >= _KEPT_SPECS:
            self._pickled.pop(next(iter(self._pickled)))
        self._pickled[id(spec)] = (spec, digest, data)
        return digest, data

    def await_start(self, worker: _Worker) -> None:
        """Return once `worker` runs. Waits up to `Timeouts.start_s` for a new one."""
        if worker.ready is None:
            return
        try:
            ray.get(worker.ready, timeout=self._timeouts.start_s)
        except GetTimeoutError:
            raise DeadlineExceededError(
                f"Input worker {worker.name} must start within {self._timeouts.start_s:g} s (Timeouts.start_s), and "
                f"has not. It asks for {self._resources or 'no resources'}: the cluster may have nothing left to give."
            ) from None
        except RayError as error:
            raise self.explain(error, worker, "starting") from error
        worker.ready = None

    def explain(self, error: RayError, worker: _Worker, doing: str) -> Exception:
        """The error to raise for a worker that is gone; after it the pool takes no more work."""
        if self._closed:
            return CancelledError("This pool of input workers was closed while it worked.")
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        gone = "is gone" if isinstance(error, RayActorError) else "failed"
        self._failure = UnavailableError(
            f"Input worker {worker.name} {gone} while {doing}: {lines[0] if lines else type(error).__name__} "
            "Its process may have been killed, or run out of memory. Iterate again, or load the last saved state."
        )
        return self._failure

    @property
    def worker_names(self) -> list[str]:
        """Names of the actors that have been started."""
        return [worker.name for worker in self._workers]

    def serves(self, num_workers: int, resources: Mapping[str, float], timeouts: Timeouts) -> bool:
        """Whether this is a pool as asked for."""
        return (self.num_workers, self._resources, self._timeouts) == (num_workers, dict(resources), timeouts)

    def is_idle(self, timeout_s: float) -> bool:
        """Whether every worker finishes what it has within `timeout_s`, so that the pool can serve another pass."""
        if self._closed or self._failure is not None:
            return False
        end = time.monotonic() + timeout_s
        refs = [ref for worker in self._workers for ref in worker.under_way]
        return not refs or not ray.wait(refs, num_returns=len(refs), timeout=max(0.0, end - time.monotonic()))[1]

    def close(self) -> None:
        """Kill the workers. What waits for a result gets CancelledError. May be called twice."""
        self._closed = True
        workers, self._workers = self._workers, []
        for worker in workers:
            if ray.is_initialized():
                ray.kill(worker.actor, no_restart=True)


def open_pool(options: Options) -> ActorExecutor:
    """The pool for a plain iterator over a dataset with `Options(num_input_workers=)`; joins or starts Ray."""
    connect()
    return ActorExecutor(options.num_input_workers, name="raydist-input")


def _cause_of(error: RayTaskError, worker: str, stage: str) -> Exception:
    cause = error.cause if isinstance(error.cause, Exception) else error
    cause.add_note(f"In {worker}, sending the result of stage {stage}.")
    return cause
