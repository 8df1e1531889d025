"""The executor of a plain iterator: begins in the thread that iterates, measures, and moves stages to threads and back.

There is no thread for deciding: whoever gives a stage a block looks whether it is time to.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import final

from raydist.errors import CancelledError
from raydist.pipelines.autotune.model import Limits, StageSetting
from raydist.pipelines.autotune.tuned_part import TunedPart
from raydist.pipelines.autotune.tuned_prefetch import TunedPrefetch
from raydist.pipelines.autotune.tuned_stage import TunedStage
from raydist.pipelines.autotune.tuner import Decision, Period, Tuner
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.engine.budget import Budgets
from raydist.pipelines.engine.executor import Executor, InlineExecutor, Pending
from raydist.pipelines.engine.kernel import StageSpec
from raydist.pipelines.engine.optional_prefetch import OptionalPrefetch
from raydist.pipelines.metering.iteration_meters import IterationMeters
from raydist.pipelines.metering.meter import Meter

__all__ = ["TunedExecutor"]

_PERIOD_S = 0.05
_TRIAL_PERIOD_S = 0.02


@final
class TunedExecutor(Executor):
    """Decides where each stage runs while the pipeline runs.

    Args:
        tuners: What earlier iterations of the same pipeline have learned, unless it is in use; this one takes it and
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
        """A stage of this name; all passes over it share one."""
        if not meters.enabled:
            return InlineExecutor()
        part = self._parts.get(meter.name)
        if not isinstance(part, TunedStage):
            part = TunedStage(meter, budgets, _weak(self._look))
            self._add(part, meters, budgets)
        return part

    def for_prefetch(self, meter: Meter, meters: IterationMeters, budgets: Budgets) -> OptionalPrefetch | None:
        """A prefetch of this name."""
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
        """Decide if it is time to. The last part of the pipeline knows best when a period is full."""
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
        """Who gets fewer workers comes first: what they leave is free when their threads have ended."""
        for name, part in sorted(self._parts.items(), key=lambda item: change.settings[item[0]].workers):
            self._apply(part, change.settings[name])

    def _apply(self, part: TunedPart, setting: StageSetting) -> None:
        cost = self._tuner.costs.get(part.knob.name)
        part.apply(setting, row_s=cost.row_s if cost else 0.0, block_bytes=cost.block_bytes if cost else 0.0)

    def submit(self, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> Pending:
        """A block of no stage that was asked for: here and now."""
        if self._closed:
            raise CancelledError(f"{spec.name} needs an open executor, and this one is closed. Use a new iterator.")
        return InlineExecutor().submit(spec, block, starts)

    def close(self) -> None:
        for part in tuple(self._parts.values()):  # a thread that reads ahead may have begun with another one
            part.end()
        if not self._closed:
            self._closed = True
            self._tuner.pause()
            self._tuners.append(self._tuner)


@final
class _PeriodClock:
    """Seconds between two decisions, and how many of them the consumer waited."""

    def __init__(self, meters: IterationMeters, budgets: Budgets) -> None:
        self.meters = meters
        self.budgets = budgets
        self._began_at = time.perf_counter()
        self._waited_s = self._consumer_wait_s

    def lap(self, now: float) -> tuple[float, float]:
        """Of the time since the last call: all of it, and what the consumer waited."""
        waited_s = self._consumer_wait_s
        elapsed_s, wait_s = now - self._began_at, waited_s - self._waited_s
        self._began_at, self._waited_s = now, waited_s
        return elapsed_s, min(max(0.0, wait_s), elapsed_s)

    @property
    def _consumer_wait_s(self) -> float:
        return self.meters.elapsed_s - self.meters.consumer_busy_s


def _weak(method: Callable[[TunedPart], None]) -> Callable[[TunedPart], None]:
    """`method`, without keeping its object: parts do not keep the executor alive that ends them."""
    reference = weakref.WeakMethod(method)

    def call(part: TunedPart) -> None:
        if (alive := reference()) is not None:
            alive(part)

    return call
