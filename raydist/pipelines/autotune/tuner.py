"""The autotuner: changes settings while the consumer waits, and keeps only measured improvements.

The autotuner is a function of the periods that it receives: no clock, no thread, no Ray. The model of `model.py`
proposes the next trial; the measured speed of the pipeline before and after decides if a change stays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from raydist.pipelines.autotune.costs import Cost, StagePeriod, learn
from raydist.pipelines.autotune.model import (
    INLINE,
    Knob,
    Limits,
    Load,
    Settings,
    StageSetting,
    Workload,
    predict_s,
    workers_of,
)
from raydist.pipelines.autotune.propose import fits, propose

__all__ = ["Decision", "Period", "Tuner"]

_WAITS = 0.05  # share of its time that a consumer must wait before a change
_PREDICTED = 0.08  # gain that the model must predict for a trial
_COMPUTES = 0.1  # a stage with a larger share of the GIL gets more workers step by step
_CONSUMER_WORKS = 0.2  # share of its time that a consumer must work for a trial of a prefetch
_PREFETCHED_S = 0.0005  # time per block that justifies a prefetch: handing one over costs 0.1 ms
_HANDED_OVER_S = 0.0003  # work per block that justifies a thread: handing over costs 0.05 to 0.1 ms
_AWAITED = 0.1  # share of the time spent waiting for a stage that justifies one more worker
_GAIN = 0.05  # measured gain that keeps a change
_HOPELESS = 0.5  # a loss that ends a trial at once; half of it ends a trial after two periods
_JUDGED = 3  # periods of a trial, if it is not clear before
_PATIENCE = (16, 1024)  # periods until failed settings are tried again, first and at most
_FIRST_LOOK = 10  # periods before the first trial: pipelines of less than half a second stay undisturbed
_REST = 4  # periods between two trials, doubled with each failure
_MOST_IN_VAIN = 8
_COMPARED = (16, 1024)  # periods until the next comparison with inline, first and at most
_COMPARED_IF_SURE = 32  # and first, after a large gain: a comparison costs as much as it finds
_BEYOND_DOUBT = 0.5  # gain that is certain: a smaller one is compared with inline again at once
_LOSS_OF_INLINE = 1 - 1 / (1 + _BEYOND_DOUBT)  # the same gain, as a loss of inline
_MISJUDGED = 0.75  # ratio of a row's current time to its earlier time
_RECENT_SPEEDS = 3


@final
@dataclass(frozen=True, slots=True)
class Period:
    """The activity of a pipeline between two decisions.

    Attributes:
        elapsed_s: Duration in seconds.
        consumer_wait_s: Seconds of these that the consumer waited.
        consumer_busy_s: Seconds of these that the consumer worked.
        stages: Activity of each knob.
    """

    elapsed_s: float
    consumer_wait_s: float
    consumer_busy_s: float
    stages: Sequence[StagePeriod]


@final
@dataclass(frozen=True, slots=True)
class Decision:
    """New settings, with the reason."""

    settings: Settings
    why: str


@final
@dataclass(slots=True)
class _Trial:
    before: Settings
    speed_before: float
    comparing: bool  # of earlier settings with inline: inline stays unless it is slower
    settling: bool = True
    speeds: list[float] = field(default_factory=list)


@final
class Tuner:
    """A tuner that receives every period and returns new settings, or None to continue.

    Attributes:
        limits: Limits for all knobs together, which no result exceeds. May be changed between two steps.
        settings: Setting of every knob. The caller writes the actual settings here if they differ.
        costs: Learned cost of each stage.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits(0)
        self.settings: dict[str, StageSetting] = {}
        self.costs: Mapping[str, Cost] = {}
        self._knobs: dict[str, Knob] = {}
        self._weights: dict[str, float] = {}  # weight of a row of each knob: fixed, so that speeds are comparable
        self._trial: _Trial | None = None
        self._speeds: deque[float] = deque(maxlen=_RECENT_SPEEDS)
        self._now = 0
        self._waited = 0  # periods in which the consumer waited
        self._in_vain = 0  # successive failed trials
        self._resting_until = 0
        self._compare_at, self._compare_gap = 0, 0  # time of and periods until the next comparison with inline
        self._is_sure = False  # better than inline: by far at first, and inline has not won since
        self._failures: dict[str, tuple[int, int]] = {}  # failed settings: blocked until, and patience

    def add(self, knob: Knob) -> None:
        """Add a knob, which starts inline."""
        self._knobs.setdefault(knob.name, knob)
        self.settings.setdefault(knob.name, INLINE)

    def pause(self) -> None:
        """Undo an unfinished trial at the end of an iteration; the pipeline may run again."""
        if self._trial is not None:
            self.settings.update(self._trial.before)
        self._trial = None

    @property
    def is_trying(self) -> bool:
        """True during a trial: short periods then limit the cost of bad settings."""
        return self._trial is not None

    def step(self, period: Period) -> Decision | None:
        """Learn from `period`, which ran with `settings`, and return the next decision."""
        self._now += 1
        self._learn(period)
        if self._trial is not None:
            return self._judge(self._trial, period)
        if period.consumer_wait_s < _WAITS * period.elapsed_s:
            return None
        self._speeds.append(self._speed(period))
        self._waited += 1
        if self._waited < _FIRST_LOOK or len(self._speeds) < 2 or self._now < self._resting_until:
            return None
        if workers_of(self.settings) and self._now >= self._compare_at:
            return self._compare_with_inline()
        return self._try_more(period)

    def _learn(self, period: Period) -> None:
        before = self.costs
        self.costs = learn(before, period.stages, period.elapsed_s)
        for name, cost in self.costs.items():
            self._weights.setdefault(name, cost.row_s)
            if name in before and cost.row_s < _MISJUDGED * before[name].row_s and self.settings[name].workers:
                self._compare_at = self._now  # the stage is cheaper than when it was moved

    def _speed(self, period: Period) -> float:
        """Return the work done per second: about 1 for one undisturbed thread."""
        return sum(stage.rows * self._weights.get(stage.name, 0.0) for stage in period.stages) / period.elapsed_s

    def _load(self, period: Period) -> Load:
        """Return the work of the period. Work of neither a stage nor the consumer is `rest_s`."""
        split = next((name for name, knob in self._knobs.items() if knob.splits), "")
        stages = [stage for stage in period.stages if stage.name in self.costs and stage.name != split]
        own_s = next((stage.busy_s for stage in period.stages if stage.name == split), None)
        if own_s is None:
            own_s = period.elapsed_s - period.consumer_busy_s
        works = {stage.name: self.costs[stage.name].work(stage) for stage in stages}
        here_s = sum(_here_s(stage, works[stage.name]) for stage in stages)
        return Load(list(works.values()), max(0.0, own_s - here_s), period.consumer_busy_s, split)

    def _try_more(self, period: Period) -> Decision | None:
        load = self._load(period)
        proposal = self._modelled(load, self._open(period)) or self._one_more(load, period)
        if proposal is None:
            return None
        return self._begin(proposal, f"the consumer waits {period.consumer_wait_s / period.elapsed_s:.0%} of the time")

    def _open(self, period: Period) -> list[Knob]:
        """Return the knobs worth setting: stages whose largest blocks justify a thread.

        A prefetch also needs such blocks, and a consumer that does other work meanwhile.
        """
        works = period.consumer_busy_s > _CONSUMER_WORKS * period.elapsed_s
        cheap = {stage.name for stage in period.stages if stage.busy_s < _PREFETCHED_S * stage.blocks or not works}
        light = {name for name, cost in self.costs.items() if cost.handed_over_s < _HANDED_OVER_S}
        return [knob for knob in self._knobs.values() if knob.name not in (cheap if knob.splits else light)]

    def _modelled(self, load: Load, knobs: Sequence[Knob]) -> Settings | None:
        """Return the best settings under the model, if the predicted gain is large enough."""
        costs = self.costs.items()
        most = {name: 2 * cost.proven if cost.serial > _COMPUTES else self.limits.workers for name, cost in costs}
        proposal = propose(load, knobs, self.limits, most)
        enough = predict_s(load, proposal) < (1 - _PREDICTED) * predict_s(load, self.settings)
        return proposal if enough and not self._is_tried(proposal) else None

    def _one_more(self, load: Load, period: Period) -> Settings | None:
        """Return settings with one more worker for the stage waited for most: the model may be wrong."""
        slowest = max(period.stages, key=lambda stage: stage.awaited_s, default=None)
        if slowest is None or slowest.awaited_s < _AWAITED * period.elapsed_s:
            return None
        setting = self.settings[slowest.name]
        more = {**self.settings, slowest.name: StageSetting(setting.place, setting.workers + 1)}
        return more if fits(load, more, self.limits) and not self._is_tried(more) else None

    def _begin(self, settings: Settings, why: str, *, comparing: bool = False) -> Decision:
        self._trial = _Trial(dict(self.settings), sum(self._speeds) / len(self._speeds), comparing)
        return self._change(settings, why)

    def _compare_with_inline(self) -> Decision:
        inline = dict.fromkeys(self._knobs, INLINE)
        return self._begin(inline, f"to compare with {_moved(self.settings)}", comparing=True)

    def _judge(self, trial: _Trial, period: Period) -> Decision | None:
        if trial.settling:
            trial.settling = False
            return None
        trial.speeds.append(self._speed(period))
        speed = sum(trial.speeds) / len(trial.speeds)
        gain = speed / trial.speed_before - 1 if trial.speed_before else 1.0
        hopeless = _LOSS_OF_INLINE if trial.comparing and self._is_sure else _HOPELESS / len(trial.speeds)
        if gain > -hopeless and len(trial.speeds) < _JUDGED:
            return None
        self._trial = None
        self._speeds.clear()
        if gain >= (0.0 if trial.comparing else _GAIN):
            if trial.comparing and self._is_sure:  # something else may have disturbed the earlier periods
                self._is_sure = False
                return self._take_back(trial, gain, compare_after=_JUDGED)
            self._speeds.append(speed)
            self._keep(trial, gain)
            return None
        self._is_sure |= trial.comparing and gain < -_LOSS_OF_INLINE
        return self._take_back(trial, gain)

    def _keep(self, trial: _Trial, gain: float) -> None:
        """Keep the settings on trial. Comparisons with inline follow at growing intervals."""
        if trial.comparing:
            self._rest()
            self._remember_failure(trial.before)
            return
        self._in_vain = 0
        if not workers_of(trial.before):
            self._is_sure = gain > _BEYOND_DOUBT
            self._compare_gap = _COMPARED_IF_SURE if self._is_sure else 2
            self._compare_at = self._now + self._compare_gap

    def _take_back(self, trial: _Trial, gain: float, *, compare_after: int | None = None) -> Decision:
        given = f"{_moved(self.settings) or 'inline'} gave {gain:+.0%}"
        if trial.comparing:
            if compare_after is None:
                compare_after = self._compare_gap = min(_COMPARED[1], max(_COMPARED[0], 2 * self._compare_gap))
            self._compare_at = self._now + compare_after
        else:
            self._rest()
            self._remember_failure(self.settings)
        return self._change(trial.before, given)

    def _rest(self) -> None:
        self._in_vain = min(_MOST_IN_VAIN, self._in_vain + 1)
        self._resting_until = self._now + _REST * 2**self._in_vain

    def _is_tried(self, settings: Settings) -> bool:
        return self._now < self._failures.get(_shown(settings), (0, 0))[0]

    def _remember_failure(self, settings: Settings) -> None:
        key = _shown(settings)
        first, most = _PATIENCE
        patience = min(most, 2 * self._failures[key][1]) if key in self._failures else first
        self._failures[key] = (self._now + patience, patience)

    def _change(self, settings: Settings, why: str) -> Decision:
        before = dict(self.settings)
        if workers_of(settings) > self.limits.workers:  # an undo after the limits have become lower
            settings = dict.fromkeys(self._knobs, INLINE)
        self.settings.update(settings)
        changed = {name: setting for name, setting in settings.items() if before.get(name) != setting}
        return Decision(self.settings, f"{_shown(changed)}: {why}")


def _here_s(stage: StagePeriod, work: Workload) -> float:
    """Return the seconds of the consumer's thread for a stage: work, moves of blocks, waits for workers."""
    if stage.setting.place == "inline":
        return stage.busy_s
    return stage.awaited_s + (work.moving_s if stage.setting.place == "actors" else 0.0)


def _shown(settings: Settings) -> str:
    return ", ".join(f"{name} {setting}" for name, setting in sorted(settings.items()))


def _moved(settings: Settings) -> str:
    """Return the text of the settings that are not inline."""
    return _shown({name: setting for name, setting in settings.items() if setting.workers})
