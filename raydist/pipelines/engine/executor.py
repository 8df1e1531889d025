"""The executor interface: where the work of a stage runs.

A stage is a chain of fused kernels: see `kernel.py`. This package implements the interface with threads, and the layer
above with actors.
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
from raydist.pipelines.engine.read_ahead import OptionalPrefetch
from raydist.pipelines.metering.iteration_meters import IterationMeters
from raydist.pipelines.metering.meter import Meter, StagePlace


class Pending(ABC):
    """The future result of one submitted block."""

    @abstractmethod
    def result(self) -> StageResult:
        """Return the result. Blocks up to the executor's limit; raises DeadlineExceededError or UnavailableError."""

    def done(self) -> bool:
        """Return True if `result` does not block."""
        return True

    def cancel(self) -> None:  # noqa: B027 - finished work cannot be cancelled
        """Discard the result: a caller that waits for it gets a CancelledError."""


class Executor(ABC):
    """An interface that runs stages on blocks.

    Attributes:
        window: Useful number of blocks in flight; 1 for an executor that works inside `submit`.
        place: Where the work runs; "inline" is the caller's thread.
        num_workers: Number of blocks processed at a time.
        least_rows: Elements of a block that make its work worth the transfer.
        stores_results: True if results may be row ids; then `submit` takes blocks of row ids, too.
    """

    window: int
    stores_results: bool = False
    place: StagePlace = "inline"
    num_workers: int = 1
    least_rows: int = 1

    def for_stage(self, meter: Meter, meters: IterationMeters, budgets: Budgets) -> Executor:
        """Return the executor of one stage whose parallelism is left to raydist. This executor closes it."""
        return self

    def for_prefetch(
        self,
        meter: Meter,
        meters: IterationMeters,
        budgets: Budgets,
        *,
        threads: int = 1,
        requested: bool = False,
        inside: Meter | None = None,
    ) -> OptionalPrefetch | None:
        """Return the policy that switches a prefetch on and off; None for an executor without such a policy.

        `cpu_budget` does not limit `requested` threads. `inside` is the meter of the threads of sources without meters.
        """
        return None

    def block_size(self, spec: StageSpec, together: int) -> BlockSize:
        """Return the block size policy of a stage whose consumer takes `together` elements at a time."""
        known = spec.kernels[-1].element_bytes if spec.kernels else None
        return BlockSize(away=self.place == "actors", together=together, element_bytes=known)

    @abstractmethod
    def submit(self, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> Pending:
        """Start `run_stage(spec, block, starts)`."""

    @abstractmethod
    def close(self) -> None:
        """Discard blocks that have not begun, and stop. May be called twice."""


@final
@dataclass(frozen=True, slots=True)
class _Ready(Pending):
    value: StageResult

    def result(self) -> StageResult:
        return self.value


@final
class InlineExecutor(Executor):
    """An executor that works inside `submit`, in the caller's thread."""

    def __init__(self) -> None:
        self.window = 1

    def submit(self, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> Pending:
        return _Ready(run_stage(spec, block, starts))

    def close(self) -> None:
        """Do nothing: no thread runs."""
