"""Automatic prefetching, from the second block on and while it pays, where the user leaves the choice to raydist."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

from raydist.pipelines.autotune.ahead_judge import WORTH_S, AheadJudge, Lap
from raydist.pipelines.engine.budget import Budgets
from raydist.pipelines.engine.buffer_size import BufferSize
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.optional_prefetch import OptionalPrefetch
from raydist.pipelines.engine.prefetch_thread import PrefetchThread
from raydist.pipelines.metering.meter import Meter

__all__ = ["EagerPrefetch"]


@final
class EagerPrefetch(OptionalPrefetch):
    """A prefetch that starts without a thread. May serve several iterators read in turn: see :class:`AheadJudge`.

    Args:
        judge: Policy that decides.
        meter: Reports the fill level of the buffer, while there is one.
        budgets: Budget for the bytes in the buffer.
        name: Name of the operation, for the thread.
        watch: Called by a thread with the seconds that each block took.
        show: Called with True when threads start to prefetch, with False when they stop.
        clock: Returns seconds.
        cpu_clock: Returns CPU seconds of the calling thread.
    """

    def __init__(
        self,
        judge: AheadJudge,
        meter: Meter,
        budgets: Budgets,
        *,
        name: str,
        watch: Callable[[float], None],
        show: Callable[[bool], None],
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._judge = judge
        self._meter = meter
        self._budgets = budgets
        self._name = name
        self._watch = watch
        self._show = show
        self._shown = False
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._left_at: float | None = None  # when the consumer got the last block that the judge received
        self._cpu_s = 0.0
        self._busy_s = self._made_s = 0.0
        self._rows = self._blocks = 0

    @property
    def is_on(self) -> bool:
        return self._judge.is_on

    def look(self) -> None:
        if self._judge.is_on and self._left_at is not None:
            self._busy_s = self._clock() - self._left_at

    def made(self, seconds: float) -> None:
        self._made_s += seconds

    def handed_out(self, rows: int, num_bytes: int) -> None:
        self._rows += rows
        self._blocks += 1
        if self._judge.is_on or self._left_at is None or self._made_s > WORTH_S:
            self._tell()

    def _tell(self) -> None:
        """Report the blocks since the last report to the judge. Without threads, fast blocks are reported together.

        The clocks alone take 2 us, a tenth of the time of a small block.
        """
        now, cpu_s = self._clock(), self._cpu_clock()
        lap = Lap(self._rows, self._made_s, blocks=self._blocks)
        if self._left_at is not None:
            elapsed_s = now - self._left_at
            used_s = max(0.0, cpu_s - self._cpu_s)  # another thread may have read the previous block
            lap.busy_s = self._busy_s if self._judge.is_on else max(0.0, elapsed_s - self._made_s)
            lap.waited_s = max(0.0, elapsed_s - used_s)
        self._judge.handed_out(lap, now)
        self._left_at, self._cpu_s, self._made_s, self._rows, self._blocks = now, cpu_s, 0.0, 0, 0
        if self._judge.is_on is not self._shown:
            self._shown = self._judge.is_on
            self._show(self._shown)

    def read_ahead(self, source: OpIterator, rows: int) -> PrefetchThread:
        size = BufferSize(rows, tuned=True)
        return PrefetchThread(
            source,
            size,
            self._budgets.ram,
            self._meter,
            name=self._name,
            watch=self._made_ahead,
            first=max(1, rows // 2),
        )

    def _made_ahead(self, seconds: float) -> None:
        self._judge.made_ahead(seconds)
        self._watch(seconds)
