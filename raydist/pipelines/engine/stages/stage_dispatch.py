"""A stage's way to its executor and back: how much is under way, and results made fit to be handed out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from raydist.foreign_errors import annotate
from raydist.pipelines.elements.blocks import Block, same_kind
from raydist.pipelines.elements.items import ElementError, Item, StageResult
from raydist.pipelines.engine.executor import Executor, Pending
from raydist.pipelines.engine.kernel import StageSpec, run_stage
from raydist.pipelines.engine.op_iterator import MACHINERY_ERRORS
from raydist.pipelines.metering.meter import Meter

__all__ = ["StageWorkers", "SentBlock", "StageDispatch"]


@final
@dataclass(frozen=True, slots=True)
class SentBlock:
    """One block under way; `starts` is where each kernel is assumed to begin."""

    block: Block
    work: Pending
    starts: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class StageWorkers:
    """Who does the work of a stage.

    Attributes:
        executor: Runs the blocks.
        most: Blocks under way at most; None for the executor's window, which may change as it runs.
        owned: Whether the stage closes the executor.
        together: Elements that the consumer takes at a time.
    """

    executor: Executor
    most: int | None = None
    owned: bool = False
    together: int = 1

    @property
    def window(self) -> int:
        """Blocks under way at most, now."""
        return self.executor.window if self.most is None else min(self.most, self.executor.window)


@final
class StageDispatch:
    """Receives the results of one stage, counts its work, and watches the size of its elements.

    Attributes:
        signatures: What each kernel made first, "" for nothing yet: all else is an error.
    """

    def __init__(self, spec: StageSpec, workers: StageWorkers, meter: Meter) -> None:
        self.signatures = ("",) * len(spec.kernels)
        self._spec = spec
        self._workers = workers
        self._meter = meter
        self._size = workers.executor.block_size(spec, workers.together)

    def rows(self, limit: int) -> int:
        """Elements of the next block, for a consumer that wants `limit`."""
        rows = self._size.rows(limit, self._workers.window, self._workers.executor.least_rows)
        self._meter.buffer_limit = rows * self._workers.window
        return rows

    def send(self, block: Block, starts: tuple[int, ...], made_in_s: float) -> SentBlock:
        """Begin the work on a block, which the input made in `made_in_s` seconds."""
        self._size.learn_input(made_in_s)
        self._meter.buffered += block.num_rows
        return SentBlock(block, self._workers.executor.submit(self._spec, block, starts), starts)

    def receive(self, sent: SentBlock, starts: tuple[int, ...]) -> StageResult:
        """The result of a block whose first element is, for each kernel, element number `starts`. Waits for it."""
        meter, here = self._meter, self._workers.executor.place == "inline"
        meter.ask()
        begin = time.perf_counter()
        result = self._result(sent)
        if not here:
            meter.awaited_s += time.perf_counter() - begin
        meter.worked(result, here=here)
        meter.buffered -= sent.block.num_rows
        assumed = sent.starts
        if assumed != starts and result.is_numbered:  # behind a filter, the numbers were only assumed
            result, assumed = run_stage(self._spec, sent.block, starts, self.signatures), starts
        self._explain_errors(result.items, assumed, starts)
        self._size.learn(sent.block, result)
        return result

    def _result(self, sent: SentBlock) -> StageResult:
        """The result of a block; one that could not be worked on at all is as many errors as it has elements."""
        try:
            return self._checked(sent, sent.work.result())
        except MACHINERY_ERRORS:
            raise
        except Exception as error:  # a function that cannot be loaded by a worker, say
            rows = sent.block.num_rows
            num_kernels = len(self._spec.kernels)
            return StageResult((ElementError(error),) * rows, (rows,) * num_kernels, ("",) * num_kernels)

    def _checked(self, sent: SentBlock, result: StageResult) -> StageResult:
        """The result; made again where it begins with another structure or dtype than the blocks before it."""
        if result.signatures == self.signatures:
            return result
        pairs = zip(self.signatures, result.signatures, strict=True)
        if any(mine and theirs and not same_kind(mine, theirs) for mine, theirs in pairs):
            result = run_stage(self._spec, sent.block, sent.starts, self.signatures)
        pairs = zip(self.signatures, result.signatures, strict=True)
        self.signatures = tuple(mine or theirs for mine, theirs in pairs)
        return result

    def _explain_errors(self, items: Sequence[Item], assumed: tuple[int, ...], starts: tuple[int, ...]) -> None:
        """Add what only the stage knows: the index of an element behind a filter."""
        for item in items:
            if isinstance(item, ElementError) and item.index is not None:
                index = item.index - assumed[item.kernel] + starts[item.kernel]
                annotate(item.error, f"In {self._spec.kernels[item.kernel].label}, element {index} of its input.")

    def close(self) -> None:
        """Forget what is under way; close the executor if it is the stage's own."""
        self._meter.buffered = 0
        if self._workers.owned:
            self._workers.executor.close()
