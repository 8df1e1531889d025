"""What an input pipeline is told to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from raydist.values import AUTOTUNE

if TYPE_CHECKING:
    from raydist.options import InputOptions, Options, Timeouts
    from raydist.pipelines.elements.items import State

__all__ = ["InputJob"]


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
    state: State | None = None

    @property
    def num_workers(self) -> int:
        """Input workers: of the input options, else of the pipeline's own; AUTOTUNE if neither says."""
        wanted = self.input_options.num_input_workers
        return self.options.num_input_workers or AUTOTUNE if wanted == AUTOTUNE else wanted

    @property
    def capacity(self) -> int:
        """Steps made and not done with: those ready, and the one in use."""
        return (self.input_options.prefetch_batches or self.num_replicas) + 1
