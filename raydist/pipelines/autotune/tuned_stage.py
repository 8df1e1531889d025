"""The work of one stage where the autotuner says: in its consumer's thread, or on threads of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import final

from raydist.pipelines.autotune.model import INLINE, Knob, StageSetting
from raydist.pipelines.autotune.propose import BLOCKS_PER_WORKER
from raydist.pipelines.autotune.tuned_part import Totals, TunedPart
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import StageResult
from raydist.pipelines.engine.budget import Budgets
from raydist.pipelines.engine.executor import Executor, InlineExecutor, Pending
from raydist.pipelines.engine.kernel import StageSpec
from raydist.pipelines.engine.threads import ThreadExecutor
from raydist.pipelines.metering.meter import Meter

__all__ = ["TunedStage"]

_WORTH_S = 0.002  # work that a block should have to be given to a thread; giving it costs 0.05 to 0.1 ms
_MOST_ROWS = 4096


@final
class TunedStage(TunedPart, Executor):
    """Begins in the caller's thread.

    Args:
        meter: The stage's.
        budgets: What it keeps to.
        look: Called before each block: now may be the time to decide.

    Attributes:
        knob, setting, totals, least_blocks, charged_bytes: See :class:`TunedPart`.
    """

    def __init__(self, meter: Meter, budgets: Budgets, look: Callable[[TunedPart], None]) -> None:
        self.knob = Knob(meter.name)
        self.totals = Totals()
        self.window = 1
        self._look = look
        self._meter = meter
        self._ram = budgets.ram
        self._here = InlineExecutor()
        self._threads = ThreadExecutor(0, budget=budgets.threads)

    def submit(self, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> Pending:
        self._look(self)
        worker = self._threads if self.setting.workers else self._here
        return _Counted(worker.submit(spec, block, starts), block, self.totals)

    def apply(self, wanted: StageSetting, *, row_s: float, block_bytes: float) -> None:
        workers = self._threads.resize(wanted.workers)
        self.setting = StageSetting("threads", workers) if workers else INLINE
        self.place, self.num_workers = self.setting.place, max(1, workers)
        self.window = max(1, BLOCKS_PER_WORKER * workers)
        self.least_blocks = self.window
        self.least_rows = min(_MOST_ROWS, math.ceil(_WORTH_S / row_s)) if workers and row_s > 0 else 1
        self._charge(int(BLOCKS_PER_WORKER * workers * block_bytes))
        self._meter.place, self._meter.parallelism = self.place, self.num_workers

    def _charge(self, num_bytes: int) -> None:
        self._ram.charge(num_bytes - self.charged_bytes)
        self.charged_bytes = num_bytes

    def end(self) -> None:
        self._threads.close()
        self._charge(0)

    def close(self) -> None:
        """It is the autotuner's executor that ends it: the next pass of a `repeat` uses it again."""


@final
class _Counted(Pending):
    """A block under way, counted when it is fetched."""

    def __init__(self, work: Pending, block: Block, totals: Totals) -> None:
        self._work = work
        self._rows = block.num_rows
        self._num_bytes = block.num_bytes
        self._totals = totals

    def result(self) -> StageResult:
        begin = time.perf_counter()
        result = self._work.result()
        totals = self._totals
        totals.awaited_s += time.perf_counter() - begin
        totals.rows += self._rows
        totals.blocks += 1
        totals.busy_s += result.busy_s
        totals.cpu_s += result.cpu_s
        totals.num_bytes += self._num_bytes + sum([item.num_bytes for item in result.items if isinstance(item, Block)])
        return result

    def done(self) -> bool:
        return self._work.done()

    def cancel(self) -> None:
        self._work.cancel()
