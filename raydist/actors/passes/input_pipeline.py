"""The InputPipeline actor: hosts the passes over distributed datasets, and owns the pieces that they store."""

from __future__ import annotations

import functools
import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

import ray

from raydist.actors.passes.batch_group import MadeStep
from raydist.actors.passes.batch_queues import QueueEntry
from raydist.actors.passes.credits import Credits
from raydist.actors.passes.production import Poll, Production
from raydist.actors.passes.shared import share_step
from raydist.actors.portable_errors import pack_error
from raydist.actors.workers.growing_executor import GrowingExecutor
from raydist.actors.workers.kept_pages import keep_pages
from raydist.actors.workers.pools_of_passes import PassPools, SharedExecutor, choose_num_workers
from raydist.errors import CancelledError, RaydistError
from raydist.pipelines.engine.machine import num_cores
from raydist.pipelines.run.executors import local_executor
from raydist.pipelines.run.iterator import DatasetIterator
from raydist.pipelines.run.steps import DealtElements, GlobalBatches, StepSource, element_views
from raydist.values import AUTOTUNE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from raydist.actors.passes.batch_queues import Position
    from raydist.actors.passes.job import InputJob
    from raydist.actors.passes.piece import GroupPiece
    from raydist.actors.workers.mapped_results import MappedResults
    from raydist.actors.workers.pool import ActorExecutor
    from raydist.options import Options
    from raydist.pipelines.engine.executor import Executor
    from raydist.pipelines.engine.op import DatasetOp
    from raydist.pipelines.metering.stats import PipelineStats

__all__ = ["InputPipeline"]

_PATIENCE_S = 1.0  # how long a closed pass may finish what it does, before the workers it had are killed


@final
class InputPipeline:
    """Runs inside an actor; one thread per pass, and Ray's threads for the calls below.

    Args:
        name: The actor's name, which its input workers' names begin with.
        put: Stores a piece and returns its reference.
        node_id: Ray node for its input workers, unless resources are asked for them; None for any.
        own_process: Memory that batches leave free may be kept for the next ones.
    """

    def __init__(
        self,
        name: str,
        put: Callable[[GroupPiece], Any] = ray.put,
        *,
        node_id: str | None = None,
        own_process: bool = False,
    ) -> None:
        self._name = name
        self._put = put
        self._node_id = node_id
        self._productions: dict[str, Production] = {}
        self._abandoned: set[str] = set()
        self._pool_of_pass: dict[str, ActorExecutor] = {}
        self._pools = PassPools()
        if own_process:
            keep_pages(None)

    def open(self, key: str, job: InputJob) -> None:
        """Begin a pass. What goes wrong in opening it (a missing file, say) is raised here."""
        ops = pickle.loads(job.ops)
        pool = self._borrow_pool(job, ops)
        give_back = functools.partial(self._give_back, pool)
        try:
            production = self._make_production(job, ops, pool, give_back)
        except BaseException:
            give_back()
            raise
        self._productions[key] = production
        if pool is not None:
            self._pool_of_pass[key] = pool
        production.start()

    def _make_production(
        self, job: InputJob, ops: Sequence[DatasetOp], pool: ActorExecutor | None, on_end: Callable[[], None]
    ) -> Production:
        make_executor = local_executor if pool is None else functools.partial(_on_pool, pool, job, len(ops))
        zero_copy = job.input_options.zero_copy
        shares = pool is not None and _on_one_node()
        return Production(
            _step_source(job, ops, make_executor),
            self._put,
            num_replicas=job.num_replicas,
            credit=_credit(job),
            zero_copy=zero_copy,
            label=job.label,
            share=functools.partial(_share, pool.mapped, zero_copy) if shares and pool is not None else None,
            on_end=on_end,
        )

    def _borrow_pool(self, job: InputJob, ops: Sequence[DatasetOp]) -> ActorExecutor | None:
        num_workers = job.num_workers
        if num_workers == AUTOTUNE:
            num_workers = choose_num_workers(ops, num_cores=num_cores(), num_replicas=job.num_replicas)
        if num_workers == 0:
            return None
        resources = job.input_options.resources_per_input_worker
        node_id = None if resources else self._node_id
        return self._pools.borrow(
            num_workers,
            name=self._name,
            resources=resources,
            timeouts=job.timeouts,
            node_id=node_id,
            memory_bytes=job.options.input_worker_memory,
        )

    def _give_back(self, pool: ActorExecutor | None) -> None:
        if pool is not None:
            self._pools.give_back(pool, patience_s=_PATIENCE_S)

    def _production(self, key: str) -> Production:
        try:
            return self._productions[key]
        except KeyError:
            raise CancelledError(
                f"This iterator of input pipeline {self._name} was closed (with its strategy, or by close()). Take a "
                "new one."
            ) from None

    def poll(self, key: str, poll: Poll) -> tuple[QueueEntry, ...]:
        """See `Production.poll`. A pass that was closed answers with that error as its last entry."""
        try:
            return self._production(key).poll(poll)
        except RaydistError as error:  # as a value: Ray would log a failure that nobody waits for any more
            return (QueueEntry(poll.start, ({},), error=pack_error(error), last=True),)

    def acknowledge(self, key: str, rank: int | None, done: int) -> None:
        """See `Production.acknowledge`. Nothing for a pass that is gone."""
        if key in self._productions:
            self._productions[key].acknowledge(rank, done)

    def lend(self, key: str, done: int) -> None:
        """See `Production.lend`."""
        self._production(key).lend(done)

    def release(self, key: str, rank: int, done: int) -> None:
        """See `Production.release`. The last reader of an abandoned pass ends it."""
        production = self._production(key)
        production.release(rank, done)
        if key in self._abandoned and not production.in_use:
            self.close(key, _PATIENCE_S)

    def abandon(self, key: str, timeout_s: float) -> None:
        """The driver's iterator is gone: end the pass, now or when the replicas that read it have stopped."""
        self._abandoned.add(key)
        production = self._productions.get(key)
        if production is None or not production.in_use:
            self.close(key, timeout_s)

    def position_of(self, key: str, rank: int) -> Position:
        """See `Production.position_of`."""
        return self._production(key).position_of(rank)

    def reclaim(self, key: str) -> Position:
        """See `Production.reclaim`."""
        return self._production(key).reclaim()

    def stats(self, key: str) -> PipelineStats:
        """See `Production.stats`."""
        return self._production(key).stats()

    def num_kept(self, key: str) -> int:
        """See `Production.num_kept`."""
        return self._production(key).num_kept()

    def close(self, key: str, timeout_s: float) -> bool:
        """End a pass; False if its thread is still busy after `timeout_s`. A pass that is gone is closed already."""
        production = self._productions.get(key)
        if production is None:
            return True
        production.close()
        pool = self._pool_of_pass.get(key)
        if pool is not None and not production.join(_PATIENCE_S):
            pool.close()  # wakes a thread that waits for a stuck worker
        ended = production.join(timeout_s)
        self._productions.pop(key, None)
        self._pool_of_pass.pop(key, None)
        self._abandoned.discard(key)
        return ended

    def open_passes(self) -> list[str]:
        """Keys of the passes that are open."""
        return list(self._productions)


def _share(mapped: MappedResults, zero_copy: bool, step: MadeStep) -> MadeStep:
    """The step by reference to what workers have made, where its pieces are parts of that."""
    return replace(step, shared=share_step(mapped, step.cuts, step.structure.paths(), zero_copy=zero_copy))


def _credit(job: InputJob) -> Credits:
    only_capacity = job.input_options.prefetch_batches is not None
    return Credits.within(_store_bytes(), job.capacity, job.num_replicas, only_capacity=only_capacity)


def _store_bytes() -> int | None:
    """Size of the smallest node's object store; None where there is no Ray."""
    if not ray.is_initialized():
        return None
    sizes = [node["Resources"].get("object_store_memory") for node in ray.nodes() if node["Alive"]]
    return min((int(size) for size in sizes if size), default=None)


def _on_one_node() -> bool:
    """Whether every replica can map what a worker has made. Another node would have to fetch all of it for a part."""
    return ray.is_initialized() and sum(node["Alive"] for node in ray.nodes()) == 1


def _on_pool(pool: ActorExecutor, job: InputJob, num_iterators: int, options: Options) -> Executor:
    """The pool for one of so many iterators; it may grow where raydist chose its size for one iterator alone."""
    if job.num_workers != AUTOTUNE or num_iterators > 1 or not options.autotune.enabled:
        return SharedExecutor(pool)
    return GrowingExecutor(pool, pool.num_workers, options.autotune.cpu_budget or num_cores())


def _step_source(job: InputJob, ops: Sequence[DatasetOp], make_executor: Callable[[Options], Executor]) -> StepSource:
    iterators = [
        DatasetIterator(
            op, options=job.options, seed=job.seed, epoch=job.epoch, convert=element_views, make_executor=make_executor
        )
        for op in ops
    ]
    source: StepSource
    if job.dealt:
        source = DealtElements(iterators, job.num_replicas)
    else:
        source = GlobalBatches(iterators[0], job.num_replicas, job.input_options.split)
    if job.state is not None:
        source.load_state_dict(job.state)
    return source
