"""The InputPipeline actor: hosts the epochs over distributed datasets, and owns the pieces that they store."""

from __future__ import annotations

import contextlib
import functools
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import ray
from ray.util.metrics import Gauge

from raydist.actors.epochs.dynamic_sharding import InputSplit, SplitServer
from raydist.actors.epochs.epoch_producer import Assembly, Credits, EpochProducer
from raydist.actors.epochs.merged_epoch import MergedEpoch
from raydist.actors.epochs.served_epoch import Poll, QueueEntry
from raydist.actors.metric_counters import MetricCounters
from raydist.actors.portable_errors import pack_error
from raydist.actors.supervision import end_on_sigterm, spoken_title
from raydist.actors.workers import result_recipes
from raydist.actors.workers.epoch_pools import EpochPools, SharedExecutor, choose_num_workers
from raydist.actors.workers.memory_limit import keep_freed_memory
from raydist.cluster.nodes import title_of_this_node
from raydist.core.errors import CancelledError, RaydistError
from raydist.core.exception_utils import annotate
from raydist.core.machine import num_cores
from raydist.core.values import AUTOTUNE
from raydist.pipelines.autotune.tuned_executor import local_executor
from raydist.pipelines.metering.stats import PipelineStats
from raydist.pipelines.run.iterator import DatasetIterator
from raydist.pipelines.run.steps import DealtElements, GlobalBatches, StepSource, WorkerBatches, element_views

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from raydist.actors.epochs.dynamic_sharding import Reader
    from raydist.actors.epochs.job import InputJob, MergedJob
    from raydist.actors.epochs.link import PipelineLink
    from raydist.actors.epochs.piece import GroupPiece
    from raydist.actors.epochs.served_epoch import Position, ServedEpoch
    from raydist.actors.workers.pool import ActorExecutor
    from raydist.options import Options
    from raydist.pipelines.engine.executor import Executor
    from raydist.pipelines.engine.op import DatasetOp


def credits_of(job: InputJob) -> Credits:
    """Return the limits for how far the epoch may run ahead of its readers."""
    only_capacity = job.input_options.prefetch_batches is not None
    return Credits.within(_store_bytes(), job.capacity, job.num_replicas, only_capacity=only_capacity)


def _store_bytes() -> int | None:
    """Return the size of the smallest object store of a node; None without Ray."""
    if not ray.is_initialized():
        return None
    sizes = [node["Resources"].get("object_store_memory") for node in ray.nodes() if node["Alive"]]
    return min((int(size) for size in sizes if size), default=None)


def _is_on_one_node() -> bool:
    return not ray.is_initialized() or sum(node["Alive"] for node in ray.nodes()) == 1


def assembly_of(job: InputJob, pool: ActorExecutor | None, node_id: str | None) -> Assembly | None:
    """Return the assembly for an epoch whose replicas may be on other nodes than its input workers; else None.

    Args:
        job: Describes the epoch.
        pool: Input workers; None for none.
        node_id: Node of the input workers; None for any.
    """
    # The replicas that a job of one worker serves are on the node of its pipeline.
    stays_on_node = job.num_pieces is not None and node_id is not None
    return None if pool is None or stays_on_node or _is_on_one_node() else Assembly(pool, job.label)


def step_source_of(job: InputJob, ops: Sequence[DatasetOp], make_executor: Callable[[Options], Executor]) -> StepSource:
    """Return the step source of the epoch, at the state in the job."""
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


_DESCRIBED = {
    "raydist_input_batches": "Global batches that input pipelines have made.",
    "raydist_input_bytes": "Bytes of these.",
    "raydist_input_bytes_here": "Bytes of these that passed through the pipeline's process.",
    "raydist_input_wait_seconds": "Seconds that readers had no work and waited for a batch, of all readers together.",
}


@final
@dataclass(frozen=True, slots=True)
class _Seen:
    """The numbers of an epoch at the last update."""

    batches: float = 0.0
    num_bytes: float = 0.0
    bytes_here: float = 0.0
    wait_s: float = 0.0


@final
class InputMetrics:
    """The Ray metrics of one input pipeline.

    Args:
        pipeline: Name of the pipeline, used as a tag.
        counters: Counters of batches, bytes and waiting time.
        fill: Gauge of the fill of queues.
    """

    def __init__(self, pipeline: str, counters: Any = None, fill: Any = None) -> None:
        self._tags = {"pipeline": pipeline}
        self._counters = counters or MetricCounters(_DESCRIBED, self._tags)
        self._fill = fill or Gauge(
            "raydist_input_queue_fill",
            description="How full the queue of a stage is when its reader asks, 0 to 1. Empty: it is too slow.",
            tag_keys=("pipeline", "stage"),
        )
        self._seen: dict[str, _Seen] = {}

    def update(self, key: str, stats: PipelineStats, wait_s: float) -> None:
        """Add the progress of an epoch since the last update; the arguments count from the start of the epoch."""
        before = self._seen.get(key, _Seen())
        num_bytes = stats.stages[-1].bytes if stats.stages else 0
        bytes_here = stats.stages[-1].bytes_here if stats.stages else 0
        now = self._seen[key] = _Seen(stats.elements, num_bytes, bytes_here, wait_s)
        self._counters.raise_by(
            {
                "raydist_input_batches": now.batches - before.batches,
                "raydist_input_bytes": now.num_bytes - before.num_bytes,
                "raydist_input_bytes_here": now.bytes_here - before.bytes_here,
                "raydist_input_wait_seconds": now.wait_s - before.wait_s,
            }
        )
        for stage in stats.stages:
            if stage.queue_fill is not None:
                self._fill.set(stage.queue_fill, tags={**self._tags, "stage": stage.name})

    def forget(self, key: str) -> None:
        """Drop the numbers of an epoch that has ended."""
        self._seen.pop(key, None)


_PUBLISH_S = 5.0  # interval between updates of Ray's metrics
_PATIENCE_S = 1.0  # for a closed epoch to finish its work before its workers are killed


@final
class InputPipeline:
    """The class of the actor, with one thread per epoch, and Ray's threads for the calls below.

    Args:
        name: Name of the actor; prefix of the input workers' names.
        put: Stores a piece and returns a reference.
        node_id: Ray node for the input workers, unless they need resources or an epoch serves several nodes; None for
            any.
        own_process: True in an actor process: set up metrics, SIGTERM handling, and malloc to keep freed memory.
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
        self._epochs: dict[str, ServedEpoch] = {}
        self._abandoned: set[str] = set()
        self._split_servers: dict[str, SplitServer] = {}
        self._claiming = threading.Lock()
        self._pool_of_epoch: dict[str, ActorExecutor] = {}
        self._pools = EpochPools()
        self._where = ""
        self._metrics: InputMetrics | None = None
        if own_process:
            end_on_sigterm()
            result_recipes.serve_losses_as(name)
            self._metrics = InputMetrics(name)
            threading.Thread(target=self._publish, args=(self._metrics,), name="raydist-metrics", daemon=True).start()
            keep_freed_memory()
            self._where = f" on {title_of_this_node()}"

    def __repr__(self) -> str:
        return spoken_title(self._name)

    def _publish(self, metrics: InputMetrics) -> None:
        while True:
            time.sleep(_PUBLISH_S)
            for key in self.open_epochs():
                self._measure(metrics, key)

    def _measure(self, metrics: InputMetrics, key: str) -> None:
        served = self._epochs.get(key)
        if isinstance(served, EpochProducer):  # epochs merged from other pipelines are counted there
            with contextlib.suppress(Exception):  # a failed metric must not fail an epoch
                metrics.update(key, served.stats(), served.starved_s)

    def open(self, key: str, job: InputJob) -> None:
        """Start an epoch. Raises the errors of opening it (a missing file, say)."""
        try:
            self._open(key, job)
        except Exception as error:
            annotate(error, f"In opening {job.label}{self._where}.")
            raise

    def _open(self, key: str, job: InputJob) -> None:
        ops = pickle.loads(job.ops)
        pool = self._borrow_pool(job, ops)
        give_back = functools.partial(self._give_back, pool)
        try:
            producer = self._make_producer(job, ops, pool, give_back)
        except BaseException:
            give_back()
            raise
        self._epochs[key] = producer
        if pool is not None:
            self._pool_of_epoch[key] = pool
        producer.start()

    def begin_again(self, key: str, job: InputJob, num_loans: int, is_abandoned: bool) -> None:
        """Begin an epoch again, also one that has ended, for replicas that read it in `num_loans` loops."""
        self.close(key, _PATIENCE_S)
        self.open(key, job)
        for _ in range(num_loans):
            self.lend(key, 0)
        if is_abandoned:
            self._abandoned.add(key)

    def open_merged(self, key: str, job: MergedJob, links: Sequence[PipelineLink]) -> None:
        """Start an epoch that merges the epochs of several workers, given by `links`."""
        merged = self._epochs[key] = MergedEpoch(links, job)
        merged.start()

    def _make_producer(
        self, job: InputJob, ops: Sequence[DatasetOp], pool: ActorExecutor | None, on_end: Callable[[], None]
    ) -> EpochProducer:
        make_executor = local_executor if pool is None else lambda options: SharedExecutor(pool)
        return EpochProducer(
            step_source_of(job, ops, make_executor),
            self._put,
            num_replicas=job.num_replicas,
            credit=credits_of(job),
            zero_copy=job.input_options.zero_copy,
            label=job.label,
            where=self._where,
            assembly=assembly_of(job, pool, None if job.input_options.resources_per_input_worker else self._node_id),
            on_end=on_end,
        )

    def _borrow_pool(self, job: InputJob, ops: Sequence[DatasetOp]) -> ActorExecutor | None:
        num_workers, resources = job.num_workers, job.input_options.resources_per_input_worker
        if num_workers == AUTOTUNE:
            num_workers = choose_num_workers(
                ops,
                num_cores=num_cores(),
                num_replicas=job.num_replicas,
                num_nodes=max(1, len(job.node_ids)),
                are_elsewhere=bool(resources),
            )
        if num_workers == 0:
            return None
        own = () if self._node_id is None else (self._node_id,)
        node_ids = () if resources else job.node_ids or own
        return self._pools.borrow(
            num_workers,
            name=self._name,
            resources=resources,
            timeouts=job.timeouts,
            node_ids=node_ids,
            memory_bytes=job.options.input_worker_memory,
        )

    def _give_back(self, pool: ActorExecutor | None) -> None:
        if pool is not None:
            self._pools.give_back(pool, patience_s=_PATIENCE_S)

    def _served(self, key: str) -> ServedEpoch:
        try:
            return self._epochs[key]
        except KeyError:
            raise CancelledError(
                f"This iterator of input pipeline {self._name} was closed (with its strategy, or by close()). Take a "
                "new one."
            ) from None

    def poll(self, key: str, poll: Poll) -> tuple[QueueEntry, ...]:
        """Do `ServedEpoch.poll`; return an error of a closed epoch as the last entry."""
        try:
            return self._served(key).poll(poll)
        except RaydistError as error:  # returned as a value: Ray would log an exception without a waiting caller
            return (QueueEntry(poll.start, ({},), error=pack_error(error), last=True),)

    def make_again(self, lost: str) -> tuple[Any]:
        """Make a stored result again that is lost with its node, and return a tuple of the new reference."""
        return (result_recipes.make_again(lost),)

    def claim(self, key: str, reader: Reader, used: int) -> InputSplit | None:
        """Do `SplitServer.claim`; return an error of a closed epoch as the last split."""
        try:
            return self._split_server(key).claim(reader, used)
        except RaydistError as error:
            return InputSplit(QueueEntry(0, ({},), error=pack_error(error), last=True))

    def give_back_splits(self, key: str, reader: Reader, used: int) -> None:
        """Do `SplitServer.return_splits`; do nothing for an epoch that is gone."""
        with contextlib.suppress(CancelledError):
            self._split_server(key).return_splits(reader, used)

    def _split_server(self, key: str) -> SplitServer:
        with self._claiming:
            return self._split_servers.setdefault(key, SplitServer(self._served(key)))

    def acknowledge(self, key: str, rank: int | None, done: int) -> None:
        """Do `ServedEpoch.acknowledge`; does nothing for an epoch that is gone."""
        if key in self._epochs:
            self._epochs[key].acknowledge(rank, done)

    def lend(self, key: str, done: int) -> None:
        self._served(key).lend(done)

    def release(self, key: str, rank: int, done: int) -> None:
        """Do `ServedEpoch.release`; end an abandoned epoch after the last reader."""
        served = self._served(key)
        served.release(rank, done)
        if key in self._abandoned and not served.in_use:
            self.close(key, _PATIENCE_S)

    def abandon(self, key: str, timeout_s: float) -> None:
        """End an epoch whose driver iterator is gone: now, or when the replicas that read it have stopped."""
        self._abandoned.add(key)
        served = self._epochs.get(key)
        if served is None or not served.in_use:
            self.close(key, timeout_s)

    def position_of(self, key: str, rank: int) -> Position:
        return self._served(key).position_of(rank)

    def reclaim(self, key: str) -> Position:
        return self._served(key).reclaim()

    def stats(self, key: str) -> PipelineStats:
        return self._served(key).stats()

    def num_kept(self, key: str) -> int:
        return self._served(key).num_kept()

    def close(self, key: str, timeout_s: float) -> bool:
        """End an epoch; return False if its thread is still busy after `timeout_s`, else True."""
        served = self._epochs.get(key)
        if served is None:
            return True
        if self._metrics is not None:
            self._measure(self._metrics, key)
            self._metrics.forget(key)
        served.close()
        pool = self._pool_of_epoch.get(key)
        if pool is not None and not served.join(_PATIENCE_S):
            pool.close()  # wakes a thread that waits for a stuck worker
        ended = served.join(timeout_s)
        self._epochs.pop(key, None)
        self._pool_of_epoch.pop(key, None)
        self._abandoned.discard(key)
        self._split_servers.pop(key, None)
        return ended

    def open_epochs(self) -> list[str]:
        return list(self._epochs)

    def is_open(self, key: str) -> bool:
        """Return True if the epoch was opened and has not ended."""
        return key in self._epochs
