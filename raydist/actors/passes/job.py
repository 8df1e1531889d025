"""What an input pipeline is told to do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

from raydist.pipelines.run.joined_states import split_workers
from raydist.values import AUTOTUNE

if TYPE_CHECKING:
    from raydist.options import InputOptions, Options, Timeouts
    from raydist.pipelines.elements.items import IteratorState

__all__ = ["InputJob", "MergedJob"]


@final
@dataclass(frozen=True, slots=True)
class InputJob:
    """One pass over a distributed dataset.

    Attributes:
        label: Name of the pass, for messages.
        ops: The pickled tuple of operations: one pipeline, or one per replica.
        dealt: Elements go to replicas whole, one each; else each element is a global batch to cut.
        num_replicas: Number of replicas.
        seed: Root seed.
        epoch: Which epoch this is.
        options: The pipeline's options.
        input_options: How it is distributed.
        timeouts: Limits.
        state: Where to go on, from `DistributedIterator.state_dict`; None for the beginning.
        serves_workers: It is the one pipeline of several workers: its input workers are spread over their nodes.
        node_ids: These nodes; none until it is opened, and where it is alone on its node.
        num_pieces: For one of several workers: replicas of all of them, for each of which its batches have a piece.
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
    def num_workers(self) -> int:
        """Input workers: of the input options, else of the pipeline's own; AUTOTUNE if neither says."""
        wanted = self.input_options.num_input_workers
        return self.options.num_input_workers or AUTOTUNE if wanted == AUTOTUNE else wanted

    @property
    def capacity(self) -> int:
        """Steps made and not done with: those ready, and the one in use."""
        return (self.input_options.prefetch_batches or self.num_replicas) + 1


@final
@dataclass(frozen=True, slots=True)
class MergedJob:
    """One pass over a distributed dataset whose workers each read a part of their own.

    Attributes:
        label: Name of the pass, for messages.
        jobs: What each worker's pipeline does, as many replicas each.
        num_pipelines: Operations in each of them.
        state: Where to go on; None for the beginning.
    """

    label: str
    jobs: tuple[InputJob, ...]
    num_pipelines: int = 1
    state: IteratorState | None = None

    @property
    def num_replicas(self) -> int:
        """Of all workers."""
        return sum(job.num_replicas for job in self.jobs)

    @property
    def timeouts(self) -> Timeouts:
        """Limits."""
        return self.jobs[0].timeouts

    @property
    def input_options(self) -> InputOptions:
        """How it is distributed."""
        return self.jobs[0].input_options

    def of_workers(self) -> tuple[InputJob, ...]:
        """The jobs, each from where it is to go on.

        Raises:
            InvalidArgumentError: The state is of another number of pipelines.
        """
        if self.state is None:
            return self.jobs
        states = split_workers(self.state, len(self.jobs), self.num_pipelines)
        return tuple(replace(job, state=state) for job, state in zip(self.jobs, states, strict=True))
