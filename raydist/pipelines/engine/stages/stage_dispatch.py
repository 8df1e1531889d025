"""Dispatch of blocks to a stage's executor: flow control, and checks of the results."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from raydist.core.exception_utils import annotate
from raydist.pipelines.elements.blocks import Block, same_kind
from raydist.pipelines.elements.items import ElementError, Item, StageResult
from raydist.pipelines.engine.executor import Executor, Pending
from raydist.pipelines.engine.kernel import StageSpec, run_stage
from raydist.pipelines.engine.op_iterator import MACHINERY_ERRORS
from raydist.pipelines.metering.meter import Meter


@final
@dataclass(frozen=True, slots=True)
class SentBlock:
    """One block in flight; `starts` is the assumed first index of each kernel."""

    block: Block
    work: Pending
    starts: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class StageWorkers:
    """The executor of a stage and its limits.

    Attributes:
        executor: Runs the blocks.
        most: Largest number of blocks in flight; None for the executor's window, which may change at run time.
        owned: True if the stage closes the executor.
        together: Elements that the consumer takes at a time.
    """

    executor: Executor
    most: int | None = None
    owned: bool = False
    together: int = 1

    @property
    def window(self) -> int:
        """The largest number of blocks in flight, now."""
        return self.executor.window if self.most is None else min(self.most, self.executor.window)


@final
class StageDispatch:
    """Sender and receiver of the blocks of one stage, which counts the work and tracks the size of elements.

    Attributes:
        signatures: Signature of each kernel's first result, "" before any. Results with another signature are errors.
    """

    def __init__(self, spec: StageSpec, workers: StageWorkers, meter: Meter) -> None:
        self.signatures = ("",) * len(spec.kernels)
        self._spec = spec
        self._workers = workers
        self._meter = meter
        self._size = workers.executor.block_size(spec, workers.together)

    def rows(self, limit: int) -> int:
        """Return the number of elements of the next block, for a consumer that wants `limit`."""
        rows = self._size.rows(limit, self._workers.window, self._workers.executor.least_rows)
        self._meter.buffer_limit = rows * self._workers.window
        return rows

    def send(self, block: Block, starts: tuple[int, ...], made_in_s: float) -> SentBlock:
        """Start the work on a block, which the input made in `made_in_s` seconds."""
        self._size.learn_input(made_in_s)
        self._meter.buffered += block.num_rows
        return SentBlock(block, self._workers.executor.submit(self._spec, block, starts), starts)

    def receive(self, sent: SentBlock, starts: tuple[int, ...]) -> StageResult:
        """Return the result of a block whose first element has index `starts` for each kernel. Blocks."""
        meter, here = self._meter, self._workers.executor.place == "inline"
        meter.ask()
        begin = time.perf_counter()
        result = self._result(sent)
        if not here:
            meter.awaited_s += time.perf_counter() - begin
        meter.worked(result, here=here)
        meter.buffered -= sent.block.num_rows
        assumed = sent.starts
        if assumed != starts and result.is_numbered:  # after a filter, the indices were assumptions
            result, assumed = run_stage(self._spec, sent.block.in_memory(), starts, self.signatures), starts
        self._explain_errors(result.items, assumed, starts)
        self._size.learn(sent.block, result)
        return result

    def _result(self, sent: SentBlock) -> StageResult:
        """Return the result of a block. If the block fails as a whole, every element becomes an error."""
        try:
            return self._checked(sent, sent.work.result())
        except MACHINERY_ERRORS:
            raise
        except Exception as error:  # such as a function that a worker cannot load
            rows = sent.block.num_rows
            num_kernels = len(self._spec.kernels)
            return StageResult((ElementError(error),) * rows, (rows,) * num_kernels, ("",) * num_kernels)

    def _checked(self, sent: SentBlock, result: StageResult) -> StageResult:
        """Return the result; run the block again if its structure or dtype differs from earlier blocks."""
        if result.signatures == self.signatures:
            return result
        pairs = zip(self.signatures, result.signatures, strict=True)
        if any(mine and theirs and not same_kind(mine, theirs) for mine, theirs in pairs):
            result = run_stage(self._spec, sent.block.in_memory(), sent.starts, self.signatures)
        pairs = zip(self.signatures, result.signatures, strict=True)
        self.signatures = tuple(mine or theirs for mine, theirs in pairs)
        return result

    def _explain_errors(self, items: Sequence[Item], assumed: tuple[int, ...], starts: tuple[int, ...]) -> None:
        """Add the index of an element after a filter to its error: only the stage knows it."""
        for item in items:
            if isinstance(item, ElementError) and item.index is not None:
                index = item.index - assumed[item.kernel] + starts[item.kernel]
                annotate(item.error, f"In {self._spec.kernels[item.kernel].label}, element {index} of its input.")

    def close(self) -> None:
        """Discard the blocks in flight; close the executor if the stage owns it."""
        self._meter.buffered = 0
        if self._workers.owned:
            self._workers.executor.close()
