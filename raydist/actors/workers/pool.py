"""A pool of InputWorker actors that implements the executor interface of the input engine.

The pool replaces a worker that crashes, exits or runs out of memory, and repeats the worker's blocks. An element that
kills workers becomes an error at the element's position.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

from raydist.actors.class_tracking import cloudpickle
from raydist.actors.supervision import first_line, wait_for
from raydist.actors.workers.crash_bisection import CrashBisection
from raydist.actors.workers.handle import KEPT_STAGES, FailedStarts, WorkerHandle, WorkerKind
from raydist.actors.workers.mapped_columns import LostResultError
from raydist.actors.workers.result_recipes import Recipe, make_again
from raydist.actors.workers.stored_results import with_row_ids
from raydist.actors.workers.worker import unpack_result
from raydist.cluster.placement import Request, await_placed
from raydist.cluster.ray_session import RaySession
from raydist.core.errors import CancelledError, DeadlineExceededError, InvalidArgumentError, UnavailableError
from raydist.core.exception_utils import annotate
from raydist.options import Timeouts
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import StageResult
from raydist.pipelines.engine.block_size import BlockSize
from raydist.pipelines.engine.executor import Executor, Pending
from raydist.pipelines.engine.kernel import StageSpec
from raydist.pipelines.metering.meter import StagePlace

_log = logging.getLogger("raydist")


_POLL_S = 0.05


@final
class RunningWorkers:
    """The wait for a pool's first running worker, and the choice of a worker for each block.

    Args:
        name: Name of the pool.
        kind: Settings of the workers.
    """

    def __init__(self, name: str, kind: WorkerKind) -> None:
        self._name = name
        self._kind = kind
        self._waiting = threading.Lock()
        self._one_has_run = self._has_warned = False
        self._began = 0.0

    def await_first(self, start: Callable[[], Sequence[WorkerHandle]], closed: Callable[[], bool]) -> None:
        """Block until a worker runs, `closed()` is True or `start_s` has passed, if workers need resources.

        Raises:
            FailedPreconditionError: The cluster can never hold a worker.
        """
        if self._one_has_run or not self._kind.resources:
            return
        with self._waiting:  # one thread waits for a worker, the others for the lock
            if not self._one_has_run:
                self._await(start(), closed)
                self._one_has_run = True

    def _await(self, workers: Sequence[WorkerHandle], closed: Callable[[], bool]) -> None:

        def wait(limit_s: float) -> bool:
            end = time.monotonic() + limit_s
            while not closed() and not any(worker.runs for worker in workers):
                if time.monotonic() >= end:
                    return False
                time.sleep(_POLL_S)
            return True

        request = Request((self._kind.resources,), "PACK", key="", what="input workers")
        await_placed(request, wait, timeout_s=self._kind.start_s)

    def place_of_next(self, workers: Sequence[WorkerHandle], loads: Sequence[int], node: str = "") -> int:
        """Return the index of the least loaded worker on `node`, else of all running workers, else of all workers."""
        self._began = self._began or time.monotonic()
        running = [index for index, worker in enumerate(workers) if worker.runs]
        if running and len(running) < len(workers):
            self._warn_of_missing(len(workers) - len(running), len(workers))
        on_node = [index for index in running if node and workers[index].node == node]
        return min(on_node or running or range(len(loads)), key=loads.__getitem__)

    def _warn_of_missing(self, missing: int, num_workers: int) -> None:
        if self._has_warned or time.monotonic() - self._began < self._kind.start_s:
            return
        self._has_warned = True
        _log.warning(
            "%d of %d input workers of %s have not started within %g s (Timeouts.start_s); the others work. Each "
            "asks for %s: the cluster may have nothing left.",
            *(missing, num_workers, self._name, self._kind.start_s, dict(self._kind.resources) or "no resources"),
        )


@final
class StagePickles:
    """A cache of the pickles of at most `most` stages."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[int, tuple[StageSpec, bytes, bytes]] = {}

    def get(self, spec: StageSpec) -> tuple[bytes, bytes]:
        """Return the digest and the pickle of a stage.

        Raises:
            InvalidArgumentError: A function cannot be pickled.
        """
        known = self._known.get(id(spec))
        if known is not None and known[0] is spec:
            return known[1], known[2]
        data = _pickle(spec)
        digest = hashlib.blake2b(data, digest_size=16).digest()
        if len(self._known) >= self._most:
            self._known.pop(next(iter(self._known)))
        self._known[id(spec)] = (spec, digest, data)
        return digest, data


def _pickle(spec: StageSpec) -> bytes:
    try:
        data: bytes = cloudpickle.dumps(spec)
    except Exception as error:
        labels = ", ".join(kernel.label for kernel in spec.kernels)
        raise InvalidArgumentError(
            f"Functions that run on input workers must be picklable, those of {labels} are not: "
            f"{type(error).__name__}: {error}. Open files, locks and connections inside the function, or set "
            "num_input_workers=0."
        ) from error
    return data


_BLOCKS_PER_WORKER = 2  # one running, one being sent


@final
class ActorExecutor(Executor):
    """An executor that sends each block to the least loaded actor of a pool. Thread-safe.

    The first block starts the workers. The workers end with the process that created the pool.

    Args:
        num_workers: Number of actors, >= 1.
        name: Prefix of the actors' names.
        timeouts: `start_s` limits the start of an actor, `element_s` one block.
        resources: Ray resources of each actor; by default none (CPU 0): actors share the cores with other processes.
        node_ids: Ray nodes to run on, round robin; empty for any node.
        memory_bytes: Memory limit of each worker; by default `resources["memory"]`, else the free memory at the start.
    """

    place: StagePlace = "actors"
    stores_results = True

    def __init__(
        self,
        num_workers: int,
        *,
        name: str = "raydist",
        timeouts: Timeouts | None = None,
        resources: Mapping[str, float] | None = None,
        node_ids: Sequence[str] = (),
        memory_bytes: int | None = None,
    ) -> None:
        self.window = num_workers * _BLOCKS_PER_WORKER
        self.closed = False
        self.num_workers = num_workers
        self._failed_starts = FailedStarts()
        self._name = f"{name}-{uuid.uuid4().hex[:8]}"
        self._timeouts = timeouts or Timeouts()
        self._kind = WorkerKind(dict(resources or {}), tuple(node_ids), memory_bytes, self._timeouts.start_s)
        self._running = RunningWorkers(self._name, self._kind)
        self._session = RaySession()
        self._lock = threading.RLock()  # guards all attributes below
        self._workers: list[WorkerHandle] = []
        self._pickles = StagePickles(KEPT_STAGES)
        self._bisection = CrashBisection(
            self, self._start_separate_worker, self._pickle_of, self._timeouts.element_s, self._failed_starts
        )
        self._started = 0
        self._sizes: dict[tuple[tuple[str, ...], int], BlockSize] = {}

    def block_size(self, spec: StageSpec, together: int) -> BlockSize:
        """Return the block size from the last iteration over the stage: a new block size takes ten steps to grow."""
        key = (tuple(kernel.label for kernel in spec.kernels), together)
        found = self._sizes.pop(key, None) or super().block_size(spec, together)
        self._sizes[key] = found
        if len(self._sizes) > KEPT_STAGES:
            del self._sizes[next(iter(self._sizes))]
        return found

    def submit(self, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> PoolTask:
        return PoolTask(self, spec, block, starts)

    def submit_on(self, node: str, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> PoolTask:
        """Submit a block, to a worker on Ray node `node` if one runs there."""
        return PoolTask(self, spec, block, starts, node)

    def send(self, spec: StageSpec, block: Block, starts: tuple[int, ...], node: str = "") -> Sending:
        """Send a block to the least loaded running worker, on Ray node `node` if one runs there."""
        self._running.await_first(self._started_workers, lambda: self.closed)
        with self._lock:
            if self.closed:
                raise CancelledError(
                    f"The pool of input workers {self._name} is closed and takes no more work, such as a block of "
                    f"stage {spec.name}. Take a new iterator to go on."
                )
            self._session.require(f"The pool of input workers {self._name}")
            self._fill()
            digest, stage = self._pickles.get(spec)
            loads = self._loads()
            index = self._running.place_of_next(self._workers, loads, node)
            worker = self._workers[index]
            answer, stored = worker.run(digest, stage, block, starts)
            return Sending(worker, answer, stored, self._timeouts.element_s * (1 + loads[index]))

    def start(self) -> None:
        """Start the workers before the first block. Does not wait for their start."""
        with self._lock:
            self._fill()

    def _started_workers(self) -> list[WorkerHandle]:
        with self._lock:
            if not self.closed:
                self._session.require(f"The pool of input workers {self._name}")
                self._fill()
            return list(self._workers)

    def _fill(self) -> None:
        while len(self._workers) < self.num_workers:
            self._workers.append(self._start_worker())

    def _start_worker(self) -> WorkerHandle:
        self._started += 1
        number = self._started - 1
        return WorkerHandle.start(f"{self._name}-worker-{number}", self._kind, number)

    def _loads(self) -> list[int]:
        """Return the number of unfinished blocks of each worker."""
        refs = [ref for worker in self._workers for ref in worker.under_way]
        finished = set(ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[0]) if refs else set()
        return [worker.forget_finished(finished) for worker in self._workers]

    def received(self) -> None:
        """Record that the result of a block has arrived."""
        self._bisection.failed_in_a_row.end()
        self._failed_starts.end()

    def replace(self, worker: WorkerHandle, error: RayActorError) -> Any:
        """Replace a dead worker; return the result reference of the block on which the worker died, or None."""
        with self._lock:
            if self.closed:
                raise CancelledError(
                    f"The pool of input worker {worker.name} was closed while that worked. Take a new iterator to go "
                    "on."
                )
            if worker in self._workers:
                if not worker.started:
                    self._failed_starts.add(worker.name, error)
                _log.warning("Input worker %s is gone and will be replaced: %s", worker.name, first_line(error))
                self._workers[self._workers.index(worker)] = self._start_worker()
            return worker.block_at_work()

    def give_up(self, worker: WorkerHandle) -> None:
        """Kill a stuck worker. The next block starts a new worker."""
        with self._lock:
            if worker in self._workers:
                self._workers.remove(worker)
            worker.kill()

    def run_alone(
        self, spec: StageSpec, block: Block, starts: tuple[int, ...], cancelled: Callable[[], bool]
    ) -> StageResult:
        """Run, row by row, a block on which a worker died; an element that kills workers becomes an error."""
        return self._bisection.run(spec, block, starts, cancelled)

    def _start_separate_worker(self) -> WorkerHandle:
        with self._lock:
            return self._start_worker()

    def _pickle_of(self, spec: StageSpec) -> tuple[bytes, bytes]:
        with self._lock:
            return self._pickles.get(spec)

    @property
    def worker_names(self) -> list[str]:
        return [worker.name for worker in self._workers]

    def serves(
        self,
        num_workers: int,
        resources: Mapping[str, float],
        timeouts: Timeouts,
        memory_bytes: int | None = None,
        node_ids: Sequence[str] = (),
    ) -> bool:
        """Return True if the pool has these settings."""
        kind = WorkerKind(dict(resources), tuple(node_ids), memory_bytes, timeouts.start_s)
        return (self.num_workers, self._kind, self._timeouts) == (num_workers, kind, timeouts)

    def is_idle(self, timeout_s: float) -> bool:
        """Return True if every worker finishes its blocks within `timeout_s`, so that the pool can serve another epoch.

        Also drop the references to finished results, so that the object store frees the memory.
        """
        if self.closed or not self._session.is_open:
            return False
        end = time.monotonic() + timeout_s
        refs = [ref for worker in self._workers for ref in worker.under_way]
        if refs and ray.wait(refs, num_returns=len(refs), timeout=max(0.0, end - time.monotonic()))[1]:
            return False
        with self._lock:
            self._loads()
        return True

    def close(self) -> None:
        """Kill the workers. A thread that waits for a result gets CancelledError. Idempotent."""
        with self._lock:
            self.closed = True
            workers, self._workers = self._workers, []
        for worker in workers:
            worker.kill()


@final
@dataclass(frozen=True, slots=True)
class Sending:
    """A block that was sent to a worker.

    Attributes:
        worker: The worker.
        ref: The reference to the answer.
        stored: The reference to the result's stored columns.
        limit_s: Limit for the result in seconds.
    """

    worker: WorkerHandle
    ref: Any
    stored: Any
    limit_s: float


@final
class PoolTask(Pending):
    """A block on a worker. The constructor sends the block; `result` sends the block again if the worker dies."""

    def __init__(
        self, pool: ActorExecutor, spec: StageSpec, block: Block, starts: tuple[int, ...], node: str = ""
    ) -> None:
        self.spec = spec
        self.block = block
        self.starts = starts
        self.pool = pool
        self._cancelled = False
        self._deaths = 0
        self._sent = pool.send(spec, block, starts, node)

    def cancel(self) -> None:
        """Make every present and later wait for the result raise CancelledError."""
        self._cancelled = True

    def _is_cancelled(self) -> bool:
        return self._cancelled or self.pool.closed

    def done(self) -> bool:
        if not self._sent.worker.reachable:
            return True  # `result` raises an error
        return bool(ray.wait([self._sent.ref], timeout=0, fetch_local=False)[0])

    def result(self) -> StageResult:
        while True:
            try:
                self._sent.worker.await_start(self._is_cancelled)
                return self._receive()
            except RayTaskError as error:  # the worker could not send the result
                raise self._cause_of(error) from None
            except RayActorError as error:
                if self._was_at_work(error):
                    return self.pool.run_alone(self.spec, self.block, self.starts, self._is_cancelled)
                self._sent = self.pool.send(self.spec, self.block, self.starts)  # the worker had not begun this block
            except LostResultError as error:  # of an earlier stage: `make_again` updates the block
                make_again(error.result)
                self._sent = self.pool.send(self.spec, self.block, self.starts)
            except ObjectLostError:  # the node with the answer died
                self._sent = self.pool.send(self.spec, self.block, self.starts)
            except RayError as error:  # the result does not fit into the object store
                raise UnavailableError(
                    f"A block of stage {self.spec.name} that input worker {self._sent.worker.name} made cannot be had: "
                    f"{first_line(error)} Iterate again, or load the last saved state.",
                    actor=self._sent.worker.name,
                ) from error

    def _was_at_work(self, error: RayActorError) -> bool:
        """Replace the dead worker; return True if this block may have killed it."""
        worker = self._sent.worker
        block_at_work = self.pool.replace(worker, error)
        if not worker.started:
            return False
        self._deaths += 1
        return block_at_work is self._sent.ref or self._deaths > 1

    def _receive(self) -> StageResult:
        if not wait_for(self._sent.ref, self._sent.limit_s, self._is_cancelled, actor=self._sent.worker.name):
            self.pool.give_up(self._sent.worker)
            raise self._timeout_error()
        result = unpack_result(ray.get(self._sent.ref, timeout=self._sent.limit_s))
        self.pool.received()
        recipe = Recipe.of(self.pool, self.spec, self.block, self.starts)
        return with_row_ids(result, self._sent.stored, recipe, self._sent.worker.node)

    def _timeout_error(self) -> DeadlineExceededError:
        labels = ", ".join(kernel.label for kernel in self.spec.kernels)
        first, last = self.starts[0], self.starts[0] + self.block.num_rows - 1
        which = f"element {first}" if first == last else f"one of the elements {first} to {last}"
        return DeadlineExceededError(
            f"Input worker {self._sent.worker.name} must finish a block of stage {self.spec.name} within "
            f"{self._sent.limit_s:g} s (Timeouts.element_s, for each block in its queue), and has not: {labels} may be "
            f"stuck at {which} of its input. The worker was killed. If the function is only slow, raise the limit."
        )

    def _cause_of(self, error: RayTaskError) -> Exception:
        cause = error.cause if isinstance(error.cause, Exception) else error
        annotate(cause, f"In {self._sent.worker.name}, sending the result of stage {self.spec.name}.")
        return cause
