"""Distributed datasets whose batches have one part per replica, made by input pipelines on actors.

There is one pipeline for all replicas, or some for each worker.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

from raydist.actors.class_tracking import cloudpickle
from raydist.actors.epochs.job import InputJob, MergedJob
from raydist.actors.readers.driver_iterator import DistributedIterator
from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.core.nest import NOTHING, map_structure
from raydist.core.values import InputContext
from raydist.distributed_dataset.base import DistributedDataset, require_batches, require_shared
from raydist.options import AutoShardPolicy, InputOptions
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.optimize.file_shards import obstacle_to_files, shard_files
from raydist.pipelines.run.plan import begin_epoch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from raydist.actors.readers.driver_epoch import EpochOpener
    from raydist.dataset import Dataset
    from raydist.options import Options, Timeouts
    from raydist.pipelines.elements.items import IteratorState
    from raydist.pipelines.engine.op import DatasetOp

_log = logging.getLogger("raydist")


@final
class ReplicaCount:
    """The number of replicas that batches are cut for. It changes when the strategy is resized.

    Attributes:
        num_replicas: Number of replicas.
        num_workers: Number of workers (nodes) of the replicas.
    """

    def __init__(self, num_replicas: int, num_workers: int = 1) -> None:
        self.num_replicas = num_replicas
        self.num_workers = num_workers
        self._iterators: weakref.WeakSet[DistributedIterator] = weakref.WeakSet()

    def follow(self, iterator: DistributedIterator) -> DistributedIterator:
        """Cut the batches of this iterator for the present number of replicas, whenever it changes."""
        self._iterators.add(iterator)
        return iterator

    def require_change(self) -> None:
        """Raise FailedPreconditionError if an open iterator cannot go on with another number of replicas."""
        for each in list(self._iterators):
            each._require_recut()

    def change(self, num_replicas: int, num_workers: int) -> None:
        """Change the number. Iterators go on with their next batch. All steps must have ended."""
        self.num_replicas, self.num_workers = num_replicas, num_workers
        for each in list(self._iterators):
            each._recut(num_replicas, num_workers)


@final
@dataclass(frozen=True, slots=True)
class InputSide:
    """The part of a strategy that its distributed datasets use.

    Attributes:
        opener: Starts epochs: the strategy's `InputPipelineActors`.
        count: Number of replicas, equal for all workers; the replicas of a worker have consecutive ranks.
        timeouts: Time limits.
        drain: Blocks until every dispatched step is done (the replicas may be reading an iterator).
        restarts: Number of times that a lost input pipeline is started again for one batch.
    """

    opener: EpochOpener
    count: ReplicaCount
    timeouts: Timeouts
    drain: Callable[[], None]
    restarts: int = 0

    @property
    def num_replicas(self) -> int:
        return self.count.num_replicas

    @property
    def num_workers(self) -> int:
        return self.count.num_workers

    @property
    def replicas_per_worker(self) -> int:
        """Number of replicas of each worker.

        Raises:
            InvalidArgumentError: The workers have different numbers of replicas.
        """
        size, rest = divmod(self.num_replicas, self.num_workers)
        if rest:
            raise InvalidArgumentError(
                f"Workers that read their own data must have equally many replicas, got {self.num_replicas} replicas "
                f"on {self.num_workers} workers. Use AutoShardPolicy.DATA, or as many devices on every worker."
            )
        return size


def chosen_policy(op: DatasetOp, policy: AutoShardPolicy, num_workers: int) -> AutoShardPolicy:
    """Return the effective policy: AUTO becomes FILE or DATA, and one worker always uses DATA.

    May call the function of an `interleave` on a first element, under AUTO with several workers.
    """
    if num_workers == 1:
        return AutoShardPolicy.DATA
    if policy is not AutoShardPolicy.AUTO:
        return policy
    obstacle = obstacle_to_files(op)
    if obstacle is None:
        _log.info("AutoShardPolicy.AUTO: the %d workers read whole files (FILE).", num_workers)
        return AutoShardPolicy.FILE
    _log.info("AutoShardPolicy.AUTO: one pipeline serves all %d workers (DATA), because %s.", num_workers, obstacle)
    return AutoShardPolicy.DATA


@final
@dataclass(frozen=True, slots=True)
class InputLayout:
    """The input pipelines of a distributed dataset.

    Attributes:
        of_workers: The operations that each worker's actor runs: one dataset of batches or of elements, or one dataset
            of elements per replica. A single entry serves the replicas of all workers.
        dealt: True if replicas get whole elements in turn; False for batches that are split.
    """

    of_workers: tuple[tuple[DatasetOp, ...], ...]
    dealt: bool

    @classmethod
    def of_batches(cls, op: DatasetOp, policy: AutoShardPolicy, num_workers: int) -> InputLayout:
        """Return the layout for one dataset of global batches.

        Raises:
            NotFoundError: Policy FILE, and the dataset reads no files.
            InvalidArgumentError: Policy FILE or AUTO, and there are fewer files than workers.
        """
        policy = chosen_policy(op, policy, num_workers)
        if policy is AutoShardPolicy.DATA:
            return cls(((op,),), dealt=False)
        if policy is AutoShardPolicy.OFF:
            return cls(((op,),) * num_workers, dealt=False)
        return cls(tuple((shard_files(op, num_workers, worker),) for worker in range(num_workers)), dealt=False)

    @classmethod
    def of_elements(cls, ops: Sequence[DatasetOp], num_workers: int) -> InputLayout:
        """Return the layout for datasets from a function: one per worker, or one per replica."""
        each = len(ops) // num_workers
        parts = (tuple(ops[worker * each : (worker + 1) * each]) for worker in range(num_workers))
        return cls(tuple(parts), dealt=True)

    def at_epoch(self, epoch: int, position: IteratorState | None = None) -> InputLayout:
        """Return the input pipelines of an epoch that begins now; see `begin_epoch`."""
        begun = {op: begin_epoch(op, epoch, position) for ops in self.of_workers for op in ops}
        same = {ops: tuple(begun[op] for op in ops) for ops in self.of_workers}
        return replace(self, of_workers=tuple(same[ops] for ops in self.of_workers))

    def job(
        self, side: InputSide, *, seed: int, epoch: int, options: Options, input_options: InputOptions
    ) -> InputJob | MergedJob:
        """Return the job of one pass.

        Raises:
            InvalidArgumentError: The pipeline cannot be pickled.
        """
        whole = InputJob(
            label=f"epoch {epoch} of the distributed dataset",
            ops=b"",
            dealt=self.dealt,
            num_replicas=side.num_replicas,
            seed=seed,
            epoch=epoch,
            options=options,
            input_options=input_options,
            timeouts=side.timeouts,
        )
        count = len(self.of_workers)
        if count == 1:
            return replace(whole, ops=pickle_ops(self.of_workers[0]), serves_workers=side.num_workers > 1)
        pickled = {ops: pickle_ops(ops) for ops in set(self.of_workers)}
        jobs = tuple(
            replace(
                whole,
                label=f"{whole.label}, worker {worker} of {count}",
                ops=pickled[ops],
                num_replicas=side.replicas_per_worker,
                num_pieces=None if self.dealt else side.num_replicas,
            )
            for worker, ops in enumerate(self.of_workers)
        )
        return MergedJob(whole.label, jobs, num_pipelines=len(self.of_workers[0]))


def pickle_ops(ops: Any) -> bytes:
    """Pickle a pipeline. Raise InvalidArgumentError with the part that cannot be pickled."""
    try:
        data: bytes = cloudpickle.dumps(ops)
    except Exception as error:
        raise InvalidArgumentError(
            f"A distributed dataset must be picklable, with the functions given to it and what these refer to: "
            f"{type(error).__name__}: {error}. Open files, locks and connections inside the function, or use "
            "from_generator with a function that opens them."
        ) from error
    return data


@final
class PerReplicaDataset(DistributedDataset):
    """A distributed dataset whose batches are nests of PerReplica, made by an input pipeline on an actor."""

    def __init__(
        self, datasets: Sequence[Dataset], side: InputSide, options: InputOptions, layout: InputLayout
    ) -> None:
        super().__init__(datasets, options)
        self._side = side
        self._layout = layout
        self._made_for = side.num_replicas, side.num_workers

    @property
    def element_spec(self) -> Any:
        return map_structure(self._piece_spec, self._datasets[0].element_spec, none=NOTHING)

    def _piece_spec(self, spec: TensorSpec) -> TensorSpec:
        if not spec.shape:
            return spec
        count = 1 if self._layout.dealt else self._side.num_replicas
        ends_apart = self._side.num_replicas > 1 and (self._layout.dealt or len(self._layout.of_workers) > 1)
        if spec.shape[0] is None or spec.shape[0] % count or ends_apart:
            return TensorSpec((None, *spec.shape[1:]), spec.dtype)
        return TensorSpec((spec.shape[0] // count, *spec.shape[1:]), spec.dtype)

    def _open_epoch(self, epoch: int, position: IteratorState | None = None) -> DistributedIterator:
        options = self._datasets[0].options()
        side = self._side
        if not self._is_whole and self._made_for != (side.num_replicas, side.num_workers):
            raise FailedPreconditionError(
                f"A dataset from a function, or whose workers read separate parts, must be distributed again after "
                f"the strategy was resized: this one was made for {self._made_for[0]} replicas on {self._made_for[1]} "
                f"workers, and now there are {side.num_replicas} on {side.num_workers}."
            )
        job = self._layout.at_epoch(epoch, position).job(
            side,
            seed=self._epochs.seed,
            epoch=epoch,
            options=options,
            input_options=self._options,
        )
        return side.count.follow(
            DistributedIterator(
                side.opener, job, find_spec=lambda: self.element_spec, drain=side.drain, restarts=side.restarts
            )
        )

    @property
    def _is_whole(self) -> bool:
        """True if one pipeline makes whole batches, which fit any number of replicas."""
        return not self._layout.dealt and len(self._layout.of_workers) == 1


def distribute(dataset: Dataset, side: InputSide, options: InputOptions) -> DistributedDataset:
    """Return the distribution of a dataset of global batches, each split into one piece per replica.

    Under `AutoShardPolicy.FILE` and `OFF` each of several workers has its own batches, and distributes their pieces.

    Raises:
        InvalidArgumentError: `per_replica` is set, which is for datasets from a function; the dataset is not batched.
    """
    require_shared(options)
    require_batches(dataset)
    policy = dataset.options().auto_shard_policy
    layout = InputLayout.of_batches(dataset._op, policy, side.num_workers)
    return PerReplicaDataset([dataset], side, options, layout)


def distribute_from_function(
    dataset_fn: Callable[[InputContext], Dataset], side: InputSide, options: InputOptions
) -> DistributedDataset:
    """Return the distribution of datasets of per-replica elements: element k of a worker goes to its replica k % R.

    The function is called once per worker; with `InputOptions(per_replica=True)` once per replica, and each replica
    reads its own dataset.
    """
    count = side.num_replicas if options.per_replica else side.num_workers
    datasets = [dataset_fn(InputContext(count, number, side.num_replicas)) for number in range(count)]
    layout = InputLayout.of_elements([dataset._op for dataset in datasets], side.num_workers)
    return PerReplicaDataset(datasets, side, options, layout)
