"""The work of one stage where the autotuner says: in its consumer's thread, or on threads of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from raydist.pipelines.autotune.costs import StagePeriod
from raydist.pipelines.autotune.model import INLINE, Knob, Setting
from raydist.pipelines.autotune.propose import BLOCKS_PER_WORKER
from raydist.pipelines.blocks import Block
from raydist.pipelines.executor import Executor, InlineExecutor, Pending, StageResult, StageSpec
from raydist.pipelines.meters import Meter
from raydist.pipelines.op import IterContext
from raydist.pipelines.threads import ThreadExecutor

__all__ = ["Totals", "TunedStage"]

_WORTH_S = 0.002  # work that a block should have to be given to a thread; giving it costs 0.05 to 0.1 ms
_MOST_ROWS = 4096


@final
@dataclass(slots=True)
class Totals:
    """What a part of a pipeline has done so far. Written without a lock: a lost block in a million changes nothing."""

    rows: int = 0
    blocks: int = 0
    busy_s: float = 0.0
    cpu_s: float = 0.0
    awaited_s: float = 0.0
    num_bytes: int = 0

    def take(self, name: str, setting: Setting) -> StagePeriod:
        """The totals as those of a period, which ends: they begin at 0 again."""
        period = StagePeriod(
            name, setting, self.rows, self.blocks, self.busy_s, self.cpu_s, self.awaited_s, self.num_bytes
        )
        self.rows = self.blocks = self.num_bytes = 0
        self.busy_s = self.cpu_s = self.awaited_s = 0.0
        return period


@final
class TunedStage(Executor):
    """Begins in the caller's thread.

    Args:
        meter: The stage's.
        ctx: Whose budgets it keeps.
        look: Called before each block: now may be the time to decide.

    Attributes:
        setting: Where its work is done now.
        totals: What was done since somebody took them.
        charged_bytes: What it has taken of the budget for memory.
    """

    def __init__(self, meter: Meter, ctx: IterContext, look: Callable[[TunedStage], None]) -> None:
        self.knob = Knob(meter.name)
        self.setting = INLINE
        self.totals = Totals()
        self.window = 1
        self._look = look
        self._meter = meter
        self._ram = ctx.budgets.ram
        self.charged_bytes = 0
        self._here = InlineExecutor()
        self._threads = ThreadExecutor(0, budget=ctx.budgets.threads)

    def submit(self, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> Pending:
        self._look(self)
        worker = self._threads if self.setting.workers else self._here
        return _Counted(worker.submit(spec, block, starts), block, self.totals)

    def apply(self, wanted: Setting, *, row_s: float, block_bytes: float) -> None:
        """Do the work as `wanted` from the next block on, as far as the budgets allow.

        Args:
            wanted: The setting.
            row_s: Seconds that one row takes: a thread gets blocks that are worth it.
            block_bytes: Bytes of a block, for the budget.
        """
        workers = self._threads.resize(wanted.workers)
        self.setting = Setting("threads", workers) if workers else INLINE
        self.place, self.num_workers = self.setting.place, max(1, workers)
        self.window = max(1, BLOCKS_PER_WORKER * workers)
        self.least_rows = min(_MOST_ROWS, math.ceil(_WORTH_S / row_s)) if workers and row_s > 0 else 1
        self._charge(int(BLOCKS_PER_WORKER * workers * block_bytes))
        self._meter.place, self._meter.parallelism = self.place, self.num_workers

    def _charge(self, num_bytes: int) -> None:
        self._ram.charge(num_bytes - self.charged_bytes)
        self.charged_bytes = num_bytes

    def close(self) -> None:
        self._threads.close()
        self._charge(0)


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
        totals.num_bytes += self._num_bytes + sum(item.num_bytes for item in result.items if isinstance(item, Block))
        return result

    def done(self) -> bool:
        return self._work.done()

    def cancel(self) -> None:
        self._work.cancel()
