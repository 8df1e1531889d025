"""The executor of a plain iterator: starts in the iterating thread, measures, and moves parts to threads and back.

There is no thread for decisions: a thread that is about to work on a block checks if a decision is due.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import final

from raydist.core.errors import CancelledError
from raydist.options import Options
from raydist.pipelines.autotune.tuner import BLOCKS_PER_THREAD, Activity, Period, TunedSetting, Tuner
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import StageResult
from raydist.pipelines.engine.block_size import BufferSize
from raydist.pipelines.engine.budget import Budget, Budgets
from raydist.pipelines.engine.executor import Executor, InlineExecutor, Pending
from raydist.pipelines.engine.kernel import StageSpec
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.prefetch_thread import PrefetchThread
from raydist.pipelines.engine.read_ahead import OptionalPrefetch
from raydist.pipelines.engine.threads import ThreadExecutor
from raydist.pipelines.metering.iteration_meters import IterationMeters
from raydist.pipelines.metering.meter import Meter

_PERIOD_S = 0.025
_WORTH_S = 0.002  # seconds of work that justify moving a block to a thread, which costs 0.05 to 0.1 ms
_MOST_ROWS = 4096
_LEAST_READ = 4  # blocks in a period of a prefetch thread: some were made before, some remain after it


class TunedPart(ABC):
    """Interface of a part of a pipeline whose threads the autotuner chooses.

    Attributes:
        setting: Description of the part.
        threads: Current number of threads.
        done: Activity since the last period.
        least_blocks: Blocks that a period needs.
        charged_bytes: Bytes taken from the memory budget for blocks in flight.
    """

    setting: TunedSetting
    threads: int = 0
    done: Activity
    least_blocks: int = 1
    charged_bytes: int = 0

    @abstractmethod
    def apply(self, wanted: int, *, row_s: float = 0.0, block_bytes: float = 0.0) -> None:
        """Use `wanted` threads from the next block on, as far as the budgets allow: `threads` has the result."""

    @abstractmethod
    def end(self) -> None:
        """End all threads. May be called twice."""

    def take_activity(self) -> Activity:
        """Return the activity since the last call."""
        done, self.done = self.done, Activity()
        return done


@final
class TunedStage(TunedPart, Executor):
    """The executor of a stage."""

    def __init__(self, meter: Meter, budgets: Budgets, look: Callable[[TunedPart], None]) -> None:
        self.setting = TunedSetting(meter.name)
        self.done = Activity()
        self.window = 1
        self._look = look
        self._meter = meter
        self._ram = budgets.ram
        self._here = InlineExecutor()
        self._pool = ThreadExecutor(0, budget=budgets.threads)

    def submit(self, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> Pending:
        self._look(self)
        worker = self._pool if self.threads else self._here
        return _Counted(worker.submit(spec, block, starts), block, self)

    def apply(self, wanted: int, *, row_s: float = 0.0, block_bytes: float = 0.0) -> None:
        self.threads = threads = self._pool.resize(wanted)
        self.place, self.num_workers = ("threads" if threads else "inline"), max(1, threads)
        self.window = self.least_blocks = max(1, BLOCKS_PER_THREAD * threads)
        self.least_rows = min(_MOST_ROWS, math.ceil(_WORTH_S / row_s)) if threads and row_s > 0 else 1
        self._charge(int(BLOCKS_PER_THREAD * threads * block_bytes))
        self._meter.place, self._meter.parallelism = self.place, self.num_workers

    def _charge(self, num_bytes: int) -> None:
        self._ram.charge(num_bytes - self.charged_bytes)
        self.charged_bytes = num_bytes

    def end(self) -> None:
        self._pool.close()
        self._charge(0)

    def close(self) -> None:
        """Do nothing: the autotuner's executor ends it, because the next pass of a `repeat` uses it again."""


@final
class _Counted(Pending):
    """A block in flight, counted when its result is fetched."""

    def __init__(self, work: Pending, block: Block, part: TunedPart) -> None:
        self._work = work
        self._rows = block.num_rows
        self._num_bytes = block.num_bytes
        self._part = part

    def result(self) -> StageResult:
        begin = time.perf_counter()
        result = self._work.result()
        done = self._part.done
        done.awaited_s += time.perf_counter() - begin
        done.rows += self._rows
        done.blocks += 1
        done.busy_s += result.busy_s
        done.num_bytes += self._num_bytes + sum([item.num_bytes for item in result.items if isinstance(item, Block)])
        return result

    def done(self) -> bool:
        return self._work.done()

    def cancel(self) -> None:
        self._work.cancel()


@final
class TunedPrefetch(TunedPart, OptionalPrefetch):
    """A prefetch that starts without a thread."""

    def __init__(
        self,
        meter: Meter,
        budgets: Budgets,
        look: Callable[[TunedPart], None],
        *,
        threads: int = 1,
        requested: bool = False,
        inside: Meter | None = None,
    ) -> None:
        self.setting = TunedSetting(meter.name, threads, requested)
        self.done = Activity()
        self._meter = meter
        self._ram = budgets.ram
        self._budget = Budget() if requested else budgets.threads
        self._look = look
        self._inside = inside
        self._running = 0

    @property
    def is_on(self) -> bool:
        return self.threads > 0 and (self._running > 0 or self._budget.free >= 1)

    def look(self) -> None:
        self._look(self)

    def apply(self, wanted: int, *, row_s: float = 0.0, block_bytes: float = 0.0) -> None:
        may_run = self._running or self._budget.free >= self.setting.ahead
        self.threads = self.setting.ahead if wanted and may_run else 0
        self.least_blocks = _LEAST_READ * self.threads if self.threads else 1
        self._meter.place, self._meter.parallelism = ("threads" if self.threads else "inline"), max(1, self.threads)
        if self.setting.ahead == 1:
            self._meter.kind = "prefetch" if self.threads else "stage"

    def read_ahead(self, source: OpIterator, rows: int) -> PrefetchThread:
        self._running += 1
        self._budget.charge(1)
        return PrefetchThread(
            source,
            BufferSize(rows, tuned=True),
            self._ram,
            self._inside or self._meter,
            name=self.setting.name,
            watch=self._made_ahead,
            first=max(1, rows // 2),
            on_end=self._ended,
        )

    def _made_ahead(self, seconds: float) -> None:
        self.made(seconds)
        if self._inside is not None:
            self._inside.read_ahead(seconds)

    def _ended(self) -> None:
        self._running -= 1
        self._budget.give()

    def made(self, seconds: float) -> None:
        self.done.busy_s += seconds

    def handed_out(self, rows: int, num_bytes: int) -> None:
        done = self.done
        done.rows += rows
        done.num_bytes += num_bytes
        done.blocks += 1

    def end(self) -> None:
        """Do nothing: the iterator that prefetches ends the thread."""


@final
class TunedExecutor(Executor):
    """An executor that decides where each part of a pipeline works while the pipeline runs.

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
        """Return the prefetch with this name; all passes share it."""
        if not meters.enabled:
            return None
        part = self._parts.get(meter.name)
        if not isinstance(part, TunedPrefetch):
            look = _weak(self._look)
            part = TunedPrefetch(meter, budgets, look, threads=threads, requested=requested, inside=inside)
            self._add(part, meters, budgets)
        return part

    def _add(self, part: TunedPart, meters: IterationMeters, budgets: Budgets) -> None:
        self._parts[part.setting.name] = self._last = part
        self._clock = self._clock or _PeriodClock(meters, budgets)
        self._tuner.add(part.setting)
        self._apply(part, self._tuner.threads[part.setting.name])

    def _look(self, part: TunedPart) -> None:
        """Decide if it is time. The last part of the pipeline decides first, because it sees full periods."""
        now = time.perf_counter()
        if now < self._due + (0.0 if part is self._last else _PERIOD_S):
            return
        if part.done.blocks < part.least_blocks and self._due:
            return
        if self._deciding.acquire(blocking=False):
            try:
                self._decide(now)
            finally:
                self._deciding.release()

    def _decide(self, now: float) -> None:
        clock = self._clock
        if clock is None or self._last is None or self._closed:
            return
        self._due = now + _PERIOD_S
        self._tuner.threads.update({name: part.threads for name, part in self._parts.items()})
        last = self._last.setting.name
        done = {name: part.take_activity() for name, part in self._parts.items()}
        period = clock.period(now, done, done[last].rows, self._parts.values())
        if period.elapsed_s > 0 and (decision := self._tuner.step(period)):
            clock.meters.decide(decision.why)
            # First the parts that lose threads: these become free only when they end.
            for name, part in sorted(self._parts.items(), key=lambda item: decision.threads[item[0]]):
                self._apply(part, decision.threads[name])

    def _apply(self, part: TunedPart, threads: int) -> None:
        cost = self._tuner.costs[part.setting.name]
        row_s = cost.row_s if cost.row_s < math.inf else 0.0
        part.apply(threads, row_s=row_s, block_bytes=cost.block_bytes)

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
    """The time between two decisions, and what the consumer and the process did in it."""

    def __init__(self, meters: IterationMeters, budgets: Budgets) -> None:
        self.meters = meters
        self._budgets = budgets
        self._at = time.perf_counter(), time.process_time(), self._waited_s

    def period(self, now: float, done: Mapping[str, Activity], rows: int, parts: Iterable[TunedPart]) -> Period:
        """Return the period since the last call."""
        before_s, before_cpu_s, before_waited_s = self._at
        self._at = now, time.process_time(), self._waited_s
        _, cpu_s, waited_s = self._at
        elapsed_s = now - before_s
        wait_s = min(max(0.0, waited_s - before_waited_s), elapsed_s)
        threads = sum(part.threads for part in parts if not part.setting.requested)
        free = min(self._budgets.threads.free, self._budgets.tuned_threads - threads)
        return Period(elapsed_s, wait_s, cpu_s - before_cpu_s, rows, done, max(0.0, free), self._budgets.ram.free)

    @property
    def _waited_s(self) -> float:
        return self.meters.elapsed_s - self.meters.consumer_busy_s


def _weak(method: Callable[[TunedPart], None]) -> Callable[[TunedPart], None]:
    """Wrap `method` with a weak reference to its object: parts must not keep alive the executor that ends them."""
    reference = weakref.WeakMethod(method)

    def call(part: TunedPart) -> None:
        if (alive := reference()) is not None:
            alive(part)

    return call


def local_executor(options: Options, tuners: list[Tuner] | None = None) -> Executor:
    """Return the executor that the options ask for, in this process: the autotuner's, or a fixed number of threads.

    Args:
        options: Options of the pipeline.
        tuners: List that keeps autotuners between iterations over one pipeline.
    """
    threads = options.threading.private_threadpool_size
    if threads is None and options.autotune.enabled:
        return TunedExecutor(tuners)
    threads = min(threads or 1, options.autotune.cpu_budget or threads or 1)
    return InlineExecutor() if threads == 1 else ThreadExecutor(threads)
