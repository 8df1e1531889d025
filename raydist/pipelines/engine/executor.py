"""The executor port: where the work of a stage is done.

A stage is a chain of fused kernels: see `kernel.py`. Threads implement the port in this package, actors above it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import StageResult
from raydist.pipelines.engine.block_size import BlockSize
from raydist.pipelines.engine.budget import Budgets
from raydist.pipelines.engine.kernel import StageSpec, run_stage
from raydist.pipelines.engine.optional_prefetch import OptionalPrefetch
from raydist.pipelines.metering.iteration_meters import IterationMeters
from raydist.pipelines.metering.meter import Meter
from raydist.pipelines.metering.reading import StagePlace

__all__ = ["Executor", "InlineExecutor", "Pending"]


class Pending(ABC):
    """The coming result of one submitted block."""

    @abstractmethod
    def result(self) -> StageResult:
        """The result. Waits, up to the executor's limit; raises DeadlineExceededError or UnavailableError."""

    def done(self) -> bool:
        """Whether `result` would answer at once."""
        return True

    def cancel(self) -> None:  # noqa: B027 - what is done at once cannot be given up
        """Nobody wants the result any more: who waits for it gets a CancelledError."""


class Executor(ABC):
    """Runs stages on blocks.

    Attributes:
        window: Blocks worth having in flight; 1 for work that is done at once.
        place: Where the work is done; "inline" is the caller's thread.
        num_workers: How many blocks are worked on at a time.
        least_rows: Elements that a block should have, so that the work on it is worth more than its way.
    """

    window: int
    place: StagePlace = "inline"
    num_workers: int = 1
    least_rows: int = 1

    def for_stage(self, meter: Meter, meters: IterationMeters, budgets: Budgets) -> Executor:
        """What runs one stage whose parallelism was left to raydist; this executor closes it.

        Args:
            meter: The stage's.
            meters: Those of the whole iteration.
            budgets: What the iteration may use.
        """
        return self

    def for_prefetch(self, meter: Meter, meters: IterationMeters, budgets: Budgets) -> OptionalPrefetch | None:
        """What decides when a pipeline is read ahead that nobody asked to; None: never."""
        return None

    def block_size(self, spec: StageSpec, together: int) -> BlockSize:
        """What says how large the blocks of a stage are, whose consumer takes so many elements `together`."""
        known = spec.kernels[-1].element_bytes if spec.kernels else None
        return BlockSize(away=self.place == "actors", together=together, element_bytes=known)

    @abstractmethod
    def submit(self, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> Pending:
        """Begin `run_stage(spec, block, starts)`."""

    @abstractmethod
    def close(self) -> None:
        """Give up what has not begun, and stop. May be called twice."""


@final
@dataclass(frozen=True, slots=True)
class _Ready(Pending):
    value: StageResult

    def result(self) -> StageResult:
        return self.value


@final
class InlineExecutor(Executor):
    """Works at once, in the caller's thread."""

    def __init__(self) -> None:
        self.window = 1

    def submit(self, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> Pending:
        return _Ready(run_stage(spec, block, starts))

    def close(self) -> None:
        """Nothing to stop."""
