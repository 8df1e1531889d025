"""The job descriptions that an input pipeline gets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

from raydist.core.values import AUTOTUNE
from raydist.pipelines.run.joined_states import split_workers

if TYPE_CHECKING:
    from raydist.options import InputOptions, Options, Timeouts
    from raydist.pipelines.elements.items import IteratorState


@final
@dataclass(frozen=True, slots=True)
class InputJob:
    """One epoch over a distributed dataset.

    Attributes:
        label: Name of the epoch, for messages.
        ops: Pickled tuple of operations: one pipeline, or one per replica.
        dealt: True if replicas get whole elements, one each; else each element is a global batch to cut.
        num_replicas: Number of replicas.
        seed: Root seed.
        epoch: Number of the epoch.
        options: Options of the pipeline.
        input_options: Options of the distribution.
        timeouts: Limits.
        state: State to continue from, from `DistributedIterator.state_dict`; None for the beginning.
        serves_workers: True for the one pipeline of several workers, whose input workers are spread over their nodes.
        node_ids: Nodes of these workers; set when the epoch is opened, else empty.
        num_pieces: Set if the job is one worker's of several: replicas of all workers, as each batch has their pieces.
    """

    label: str
    ops: bytes
    dealt: bool
    num_replicas: int
    seed: int
    epoch: int
    options: Options
    input_options: InputOptions
    timeouts: Timeouts
    state: IteratorState | None = None
    num_pieces: int | None = None
    serves_workers: bool = False
    node_ids: tuple[str, ...] = ()

    @property
    def can_be_recut(self) -> bool:
        """True if the batches can be cut for another number of replicas: one pipeline makes whole ones."""
        return not self.dealt and self.num_pieces is None

    def recut(self, num_replicas: int, num_workers: int) -> InputJob:
        """Return the job with batches for another number of replicas, on `num_workers` nodes."""
        return replace(self, num_replicas=num_replicas, serves_workers=num_workers > 1)

    @property
    def num_workers(self) -> int:
        """The number of input workers: of the input options, else of the pipeline's options, else AUTOTUNE."""
        wanted = self.input_options.num_input_workers
        return self.options.num_input_workers or AUTOTUNE if wanted == AUTOTUNE else wanted

    @property
    def capacity(self) -> int:
        """The number of unacknowledged steps: the prefetched ones and the one in use."""
        return (self.input_options.prefetch_batches or self.num_replicas) + 1


@final
@dataclass(frozen=True, slots=True)
class MergedJob:
    """One epoch over a distributed dataset whose workers read separate parts.

    Attributes:
        label: Name of the epoch, for messages.
        jobs: Job of each worker's pipeline, with the same number of replicas each.
        num_pipelines: Number of operations in each job.
        state: State to continue from; None for the beginning.
    """

    label: str
    jobs: tuple[InputJob, ...]
    num_pipelines: int = 1
    state: IteratorState | None = None

    @property
    def can_be_recut(self) -> bool:
        """False: each worker reads its own data."""
        return False

    @property
    def num_replicas(self) -> int:
        return sum(job.num_replicas for job in self.jobs)

    @property
    def timeouts(self) -> Timeouts:
        """The limits, which all jobs share."""
        return self.jobs[0].timeouts

    @property
    def input_options(self) -> InputOptions:
        """The options of the distribution, which all jobs share."""
        return self.jobs[0].input_options

    def of_workers(self) -> tuple[InputJob, ...]:
        """Return the jobs, each with its part of the state.

        Raises:
            InvalidArgumentError: The state has another number of pipelines.
        """
        if self.state is None:
            return self.jobs
        states = split_workers(self.state, len(self.jobs), self.num_pipelines)
        return tuple(replace(job, state=state) for job, state in zip(self.jobs, states, strict=True))
