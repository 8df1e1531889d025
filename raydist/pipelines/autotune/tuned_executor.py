"""The executor of a plain iterator: starts in the iterating thread, measures, and moves stages to threads and back.

There is no thread for decisions: a thread that submits a block checks if a decision is due.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import final

from raydist.errors import CancelledError
from raydist.pipelines.autotune.model import INLINE, Knob, Limits, StageSetting
from raydist.pipelines.autotune.propose import BLOCKS_PER_WORKER
from raydist.pipelines.autotune.tuned_part import Totals, TunedPart
from raydist.pipelines.autotune.tuner import Decision, Period, Tuner
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import StageResult
from raydist.pipelines.engine.budget import Budgets
from raydist.pipelines.engine.buffer_size import BufferSize
from raydist.pipelines.engine.executor import Executor, InlineExecutor, Pending
from raydist.pipelines.engine.kernel import StageSpec
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.optional_prefetch import OptionalPrefetch
from raydist.pipelines.engine.prefetch_thread import PrefetchThread
from raydist.pipelines.engine.threads import ThreadExecutor
from raydist.pipelines.metering.iteration_meters import IterationMeters
from raydist.pipelines.metering.meter import Meter

__all__ = ["TunedExecutor", "TunedPrefetch", "TunedStage"]

_WORTH_S = 0.002  # seconds of work that justify moving a block to a thread, which costs 0.05 to 0.1 ms
_MOST_ROWS = 4096


@final
class TunedStage(TunedPart, Executor):
    """The executor of a stage, which starts in the caller's thread.

    Args:
        meter: Meter of the stage.
        budgets: Budgets for threads and memory.
        look: Called before each block, to decide if it is time.

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
        """Do nothing: the autotuner's executor ends it, because the next pass of a `repeat` uses it again."""


@final
class _Counted(Pending):
    """A block in flight, counted when its result is fetched."""

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


_LEAST_READ = 4  # blocks in a period of a prefetch thread: some were made before, some remain after it


@final
class TunedPrefetch(TunedPart, OptionalPrefetch):
    """A prefetch that starts without a thread.

    Args:
        meter: Meter of the prefetch.
        budgets: Budgets for threads and memory.
        look: Called before each block, to decide if it is time.

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
            self.setting = INLINE  # a running thread returns its share of the budget when it ends
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
        """Do nothing: the iterator that prefetches ends the thread."""


_PERIOD_S = 0.05
_TRIAL_PERIOD_S = 0.02


@final
class TunedExecutor(Executor):
    """An executor that decides where each stage runs while the pipeline runs.

    Args:
        tuners: Tuners from earlier iterations of the same pipeline that are not in use. This executor takes one and
            puts it back when it is closed.
    """

    window = 1

    def __init__(self, tuners: list[Tuner] | None = None) -> None:
        self._tuners = [] if tuners is None else tuners
        self._tuner = self._tuners.pop() if self._tuners else Tuner()
        self._parts: dict[str, TunedPart] = {}
        self._last: TunedPart | None = None
        self._deciding = threading.Lock()
        self._clock: _PeriodClock | None = None
        self._due = 0.0
        self._closed = False

    def for_stage(self, meter: Meter, meters: IterationMeters, budgets: Budgets) -> Executor:
        """Return the executor of the stage with this name; all passes over the stage share it."""
        if not meters.enabled:
            return InlineExecutor()
        part = self._parts.get(meter.name)
        if not isinstance(part, TunedStage):
            part = TunedStage(meter, budgets, _weak(self._look))
            self._add(part, meters, budgets)
        return part

    def for_prefetch(self, meter: Meter, meters: IterationMeters, budgets: Budgets) -> OptionalPrefetch | None:
        """Return the prefetch with this name."""
        if not meters.enabled:
            return None
        part = self._parts.get(meter.name)
        if not isinstance(part, TunedPrefetch):
            part = TunedPrefetch(meter, budgets, _weak(self._look))
            self._add(part, meters, budgets)
        return part

    def _add(self, part: TunedPart, meters: IterationMeters, budgets: Budgets) -> None:
        self._parts[part.knob.name] = self._last = part
        self._clock = self._clock or _PeriodClock(meters, budgets)
        self._tuner.add(part.knob)
        self._apply(part, self._tuner.settings[part.knob.name])

    def _look(self, part: TunedPart) -> None:
        """Decide if it is time. The last part of the pipeline decides first, because it sees full periods."""
        now = time.perf_counter()
        if now < self._due + (0.0 if part is self._last else _PERIOD_S):
            return
        if part.totals.blocks < part.least_blocks and self._due:
            return
        if self._deciding.acquire(blocking=False):
            try:
                self._decide(now)
            finally:
                self._deciding.release()

    def _decide(self, now: float) -> None:
        clock = self._clock
        if clock is None or self._closed:
            return
        stages = [part.totals.take(name, part.setting) for name, part in self._parts.items()]
        elapsed_s, wait_s = clock.lap(now)
        self._tuner.settings.update({name: part.setting for name, part in self._parts.items()})
        self._tuner.limits = self._limits(clock.budgets)
        if elapsed_s > 0 and (change := self._tuner.step(Period(elapsed_s, wait_s, elapsed_s - wait_s, stages))):
            clock.meters.decide(change.why)
            self._carry_out(change)
        self._due = now + (_TRIAL_PERIOD_S if self._tuner.is_trying else _PERIOD_S)

    def _limits(self, budgets: Budgets) -> Limits:
        used = sum(part.setting.workers for part in self._parts.values())
        workers = used + min(budgets.threads.free, budgets.tuned_threads - used)
        charged = sum(part.charged_bytes for part in self._parts.values())
        return Limits(int(workers), budgets.ram.free + charged)

    def _carry_out(self, change: Decision) -> None:
        """Apply the settings; first to parts that lose workers, which become free only when threads end."""
        for name, part in sorted(self._parts.items(), key=lambda item: change.settings[item[0]].workers):
            self._apply(part, change.settings[name])

    def _apply(self, part: TunedPart, setting: StageSetting) -> None:
        cost = self._tuner.costs.get(part.knob.name)
        part.apply(setting, row_s=cost.row_s if cost else 0.0, block_bytes=cost.block_bytes if cost else 0.0)

    def submit(self, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> Pending:
        """Run a block of an unknown stage at once, in the caller's thread."""
        if self._closed:
            raise CancelledError(f"{spec.name} needs an open executor, and this one is closed. Use a new iterator.")
        return InlineExecutor().submit(spec, block, starts)

    def close(self) -> None:
        for part in tuple(self._parts.values()):  # a prefetch thread may add a part meanwhile
            part.end()
        if not self._closed:
            self._closed = True
            self._tuner.pause()
            self._tuners.append(self._tuner)


@final
class _PeriodClock:
    """The time between two decisions, and how much of it the consumer waited."""

    def __init__(self, meters: IterationMeters, budgets: Budgets) -> None:
        self.meters = meters
        self.budgets = budgets
        self._began_at = time.perf_counter()
        self._waited_s = self._consumer_wait_s

    def lap(self, now: float) -> tuple[float, float]:
        """Return the seconds since the last call, and how many of them the consumer waited."""
        waited_s = self._consumer_wait_s
        elapsed_s, wait_s = now - self._began_at, waited_s - self._waited_s
        self._began_at, self._waited_s = now, waited_s
        return elapsed_s, min(max(0.0, wait_s), elapsed_s)

    @property
    def _consumer_wait_s(self) -> float:
        return self.meters.elapsed_s - self.meters.consumer_busy_s


def _weak(method: Callable[[TunedPart], None]) -> Callable[[TunedPart], None]:
    """Wrap `method` with a weak reference to its object: parts must not keep alive the executor that ends them."""
    reference = weakref.WeakMethod(method)

    def call(part: TunedPart) -> None:
        if (alive := reference()) is not None:
            alive(part)

    return call
