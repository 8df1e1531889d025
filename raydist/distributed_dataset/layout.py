"""Input pipelines of a distributed dataset: one for all replicas, or some for each worker. Starts nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

from raydist.actors.class_tracking import cloudpickle
from raydist.actors.epochs.job import InputJob, MergedJob
from raydist.core.errors import InvalidArgumentError
from raydist.options import AutoShardPolicy
from raydist.pipelines.optimize.file_shards import obstacle_to_files, shard_files
from raydist.pipelines.run.plan import begin_epoch

if TYPE_CHECKING:
    from raydist.distributed_dataset.input_side import InputSide
    from raydist.options import InputOptions, Options
    from raydist.pipelines.elements.items import IteratorState
    from raydist.pipelines.engine.op import DatasetOp

_log = logging.getLogger("raydist")


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
