"""Reading a pipeline ahead of its consumer where the autotuner says that it pays."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from raydist.pipelines.autotune.model import INLINE, Knob, StageSetting
from raydist.pipelines.autotune.tuned_part import Totals, TunedPart
from raydist.pipelines.engine.budget import Budgets
from raydist.pipelines.engine.buffer_size import BufferSize
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.optional_prefetch import OptionalPrefetch
from raydist.pipelines.engine.prefetch_thread import PrefetchThread
from raydist.pipelines.metering.meter import Meter

__all__ = ["TunedPrefetch"]

_LEAST_READ = 4  # blocks of a period in which a thread reads: some were made before it, some will be left behind


@final
class TunedPrefetch(TunedPart, OptionalPrefetch):
    """Begins without a thread.

    Args:
        meter: The prefetch's.
        budgets: What it keeps to.
        look: Called before each block: now may be the time to decide.

    Attributes:
        knob, setting, totals, least_blocks, charged_bytes: See :class:`TunedPart`.
    """

    def __init__(self, meter: Meter, budgets: Budgets, look: Callable[[TunedPart], None]) -> None:
        self.knob = Knob(meter.name, splits=True)
        self.totals = Totals()
        self._meter = meter
        self._budgets = budgets
        self._look = look
        self._running = False

    @property
    def is_on(self) -> bool:
        return self.setting.workers > 0

    def look(self) -> None:
        self._look(self)

    def apply(self, wanted: StageSetting, *, row_s: float, block_bytes: float) -> None:
        if not wanted.workers:
            if self.setting.workers and not self._running:
                self._budgets.threads.give()
            self.setting = INLINE  # a thread that runs gives itself back when it ends
        elif not self.setting.workers and self._budgets.threads.take(1):
            self.setting = StageSetting("threads", 1)
        self.least_blocks = _LEAST_READ if self.setting.workers else TunedPart.least_blocks
        self._meter.place = self.setting.place
        self._meter.kind = "prefetch" if self.setting.workers else "stage"

    def read_ahead(self, source: OpIterator, rows: int) -> PrefetchThread:
        self._running = True
        return PrefetchThread(
            source,
            BufferSize(rows, tuned=True),
            self._budgets.ram,
            self._meter,
            name=self.knob.name,
            watch=self.made,
            on_end=self._ended,
        )

    def _ended(self) -> None:
        self._running = False
        self._budgets.threads.give()

    def made(self, seconds: float) -> None:
        self.totals.busy_s += seconds

    def handed_out(self, rows: int, num_bytes: int) -> None:
        totals = self.totals
        totals.rows += rows
        totals.num_bytes += num_bytes
        totals.blocks += 1

    def end(self) -> None:
        """The iterator that reads ahead ends its thread."""
