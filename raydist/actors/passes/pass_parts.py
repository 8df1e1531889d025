"""Functions that build the parts of a pass from its job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import ray

from raydist.actors.passes.assembly import Assembly
from raydist.actors.passes.credits import Credits
from raydist.actors.workers.growing_executor import GrowingExecutor
from raydist.actors.workers.pools_of_passes import SharedExecutor
from raydist.pipelines.engine.machine import num_cores
from raydist.pipelines.run.iterator import DatasetIterator
from raydist.pipelines.run.steps import DealtElements, GlobalBatches, StepSource, WorkerBatches, element_views
from raydist.values import AUTOTUNE

if TYPE_CHECKING:
    from raydist.actors.passes.job import InputJob
    from raydist.actors.workers.pool import ActorExecutor
    from raydist.options import Options
    from raydist.pipelines.engine.executor import Executor
    from raydist.pipelines.engine.op import DatasetOp

__all__ = ["assembly_of", "credits_of", "executor_on", "step_source_of"]


def credits_of(job: InputJob) -> Credits:
    """Return the limits for how far the pass may run ahead of its readers."""
    only_capacity = job.input_options.prefetch_batches is not None
    return Credits.within(_store_bytes(), job.capacity, job.num_replicas, only_capacity=only_capacity)


def _store_bytes() -> int | None:
    """Return the size of the smallest object store of a node; None without Ray."""
    if not ray.is_initialized():
        return None
    sizes = [node["Resources"].get("object_store_memory") for node in ray.nodes() if node["Alive"]]
    return min((int(size) for size in sizes if size), default=None)


def _is_on_one_node() -> bool:
    """Return True if the cluster has one node."""
    return not ray.is_initialized() or sum(node["Alive"] for node in ray.nodes()) == 1


def executor_on(pool: ActorExecutor, job: InputJob, num_iterators: int, options: Options) -> Executor:
    """Return the pool for one of `num_iterators` iterators; it may grow if AUTOTUNE chose the size for a single one."""
    if job.num_workers != AUTOTUNE or num_iterators > 1 or not options.autotune.enabled:
        return SharedExecutor(pool)
    most = options.autotune.cpu_budget or num_cores() * max(1, len(job.node_ids))
    return GrowingExecutor(pool, pool.num_workers, most)


def assembly_of(job: InputJob, pool: ActorExecutor | None, node_id: str | None) -> Assembly | None:
    """Return the assembly for a pass whose replicas may be on other nodes than its input workers; else None.

    Args:
        job: Describes the pass.
        pool: Input workers; None for none.
        node_id: Node of the input workers; None for any.
    """
    # The replicas that a job of one worker serves are on the node of its pipeline.
    stays_on_node = job.num_pieces is not None and node_id is not None
    return None if pool is None or stays_on_node or _is_on_one_node() else Assembly(pool, job.label)


def step_source_of(job: InputJob, ops: Sequence[DatasetOp], make_executor: Callable[[Options], Executor]) -> StepSource:
    """Return the step source of the pass, at the state in the job."""
    iterators = [
        DatasetIterator(
            op,
            options=job.options,
            seed=job.seed,
            epoch=job.epoch,
            convert=element_views,
            make_executor=make_executor,
            row_ids=True,
        )
        for op in ops
    ]
    source: StepSource
    if job.num_pieces is not None:
        source = WorkerBatches(iterators[0], job.num_replicas, job.num_pieces, job.input_options.split)
    elif job.dealt:
        source = DealtElements(iterators, job.num_replicas)
    else:
        source = GlobalBatches(iterators[0], job.num_replicas, job.input_options.split)
    if job.state is not None:
        source.load_state_dict(job.state)
    return source
