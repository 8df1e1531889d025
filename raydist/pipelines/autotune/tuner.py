"""The policy of the autotuner: a hill climb on the number of threads of each part of a pipeline.

While the consumer waits, the tuner gives threads to the part that promises the largest gain, measures the pipeline for
some periods, and keeps the change if the pipeline became faster. Later it compares the result with a run without
threads, ever more rarely. The tuner has no clock and no thread: it is a function of the periods that it receives.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import final

BLOCKS_PER_THREAD = 2
"""Blocks in flight for each thread of a stage: one in work, one waiting."""

_WAITS = 0.05  # share of its time that a consumer must wait before a change
_IDLE = 0.6  # of a core: a process that uses less waits for something, and more threads cannot slow it down
_FIRST_TRIAL = 16  # periods before the first trial: pipelines of less than 0.4 s stay undisturbed
_FIRST_TRIAL_IF_IDLE = 2
_WORTH = 0.1  # predicted gain that justifies a trial, as a share of the time
_STAGE_BLOCK_S = 0.0003  # work on a block that justifies a thread of a stage: handing over costs 0.05 to 0.1 ms
_PREFETCH_BLOCK_S = 0.0005  # and a prefetch thread
_GAIN = 0.05  # measured gain that keeps a change
_LOSS = 0.02  # measured loss without threads that keeps the threads
_JUDGED = 3  # periods of a trial, if it is not clear before
_HOPELESS = 0.5  # a loss that ends a trial at once; half of it ends a trial after two periods
_RETRY = (64, 2048)  # periods until failed settings are tried again, first and at most
_COMPARE = (32, 1024)  # periods until a comparison with a run without threads, first and at most
_LARGE = 1.5  # gain after which the comparison waits as long as possible: it costs as much as threads gain
_REST = 8  # periods until the next trial after a failure
_MOST_ROWS, _MOST_BYTES = 4096, 8 << 20  # of a block: see engine/block_size.py


@final
@dataclass(frozen=True, slots=True)
class TunedSetting:
    """A part of a pipeline whose threads the autotuner chooses.

    Attributes:
        name: Name of the part.
        ahead: For a prefetch, the number of threads that it has if it is on. 0 for a stage, which takes any number.
        requested: True if the user asked for these threads, so that the limit for automatic threads does not count.
    """

    name: str
    ahead: int = 0
    requested: bool = False


@final
@dataclass(slots=True)
class Activity:
    """Work of a part of a pipeline. Written without a lock: an uncounted block matters little.

    Attributes:
        rows: Number of elements.
        blocks: Number of blocks of these elements.
        busy_s: Seconds of work, in any thread.
        awaited_s: Seconds that the reader of a stage waited for its threads.
        num_bytes: Bytes of the blocks.
    """

    rows: int = 0
    blocks: int = 0
    busy_s: float = 0.0
    awaited_s: float = 0.0
    num_bytes: int = 0


@final
@dataclass(frozen=True, slots=True)
class Period:
    """The activity of a pipeline between two decisions.

    Attributes:
        elapsed_s: Duration in seconds.
        wait_s: Seconds that the consumer waited.
        cpu_s: CPU seconds of the process.
        rows: Elements that the last part of the pipeline handed out.
        parts: Activity of each part.
        free_threads: Number of further threads that the limits allow.
        free_bytes: Number of further bytes in buffers that the limits allow.
    """

    elapsed_s: float
    wait_s: float
    cpu_s: float
    rows: int
    parts: Mapping[str, Activity]
    free_threads: float = float("inf")
    free_bytes: float = float("inf")

    @property
    def is_idle(self) -> bool:
        """Return True if the process waited for something most of the time."""
        return self.cpu_s < _IDLE * self.elapsed_s


@final
@dataclass(slots=True)
class Cost:
    """The cost of a part: seconds for a row in an undisturbed thread, and bytes of its largest blocks."""

    row_s: float = float("inf")
    block_bytes: float = 0.0
    block_rows: float = 1.0

    def learn(self, did: Activity) -> None:
        """Learn from a period."""
        if did.rows and did.blocks:
            self.row_s = min(self.row_s, did.busy_s / did.rows)
            self.block_rows = did.rows / did.blocks
            self.block_bytes = max(self.block_bytes, did.num_bytes / did.blocks)

    @property
    def largest_block_s(self) -> float:
        """Seconds of work in the largest block that a thread may get."""
        row_bytes = max(1.0, self.block_bytes / max(1.0, self.block_rows))
        return self.row_s * max(1.0, min(_MOST_ROWS, _MOST_BYTES / row_bytes))


@final
@dataclass(frozen=True, slots=True)
class Decision:
    """The new number of threads of each part, with the reason."""

    threads: Mapping[str, int]
    why: str


@final
@dataclass(slots=True)
class _Trial:
    before: dict[str, int]
    speed_before: float
    comparing: bool  # with a run without threads, which stays unless it is slower
    settling: bool = True
    speeds: list[float] = field(default_factory=list)


@final
class Tuner:
    """A tuner that receives every period and returns new numbers of threads, or None to continue.

    Attributes:
        threads: Number of threads of each part. The caller writes the actual numbers here if they differ.
        costs: Learned cost of each part.
    """

    def __init__(self) -> None:
        self.threads: dict[str, int] = {}
        self.costs: dict[str, Cost] = {}
        self._settings: dict[str, TunedSetting] = {}
        self._trial: _Trial | None = None
        self._speeds: deque[float] = deque(maxlen=_JUDGED)
        self._consumer_works: deque[float] = deque([0.0], maxlen=_JUDGED)  # shares of the last periods
        self._now = 0
        self._waited = 0  # periods in which the consumer waited
        self._resting_until = 0
        self._retry: dict[str, tuple[int, int]] = {}  # failed settings: time of the next try, and the last gap
        self._compare_at, self._compare_gap = 0, _COMPARE[0]

    def add(self, setting: TunedSetting) -> None:
        """Add a part, which starts without threads."""
        self.pause()
        self._settings[setting.name] = setting
        self.threads.setdefault(setting.name, 0)
        self.costs.setdefault(setting.name, Cost())

    def pause(self) -> None:
        """Undo an unfinished trial: the iteration ends, or the pipeline gets another part."""
        if self._trial is not None:
            self.threads.update(self._trial.before)
        self._trial = None
        self._speeds.clear()

    def step(self, period: Period) -> Decision | None:
        """Learn from `period`, which ran with `threads`, and return the next decision."""
        self._now += 1
        for name, did in period.parts.items():
            self.costs[name].learn(did)
        speed = period.rows / period.elapsed_s
        self._consumer_works.append(1 - period.wait_s / period.elapsed_s)
        if self._trial is not None:
            return self._judge(self._trial, speed)
        if period.wait_s < _WAITS * period.elapsed_s:
            return None
        self._speeds.append(speed)
        self._waited += 1
        first = _FIRST_TRIAL_IF_IDLE if period.is_idle else _FIRST_TRIAL
        if self._waited < first or len(self._speeds) < 2 or self._now < self._resting_until:
            return None
        if any(self.threads.values()) and self._now >= self._compare_at:
            return self._begin(dict.fromkeys(self.threads, 0), f"to compare with {_text(self.threads)}", comparing=True)
        return self._try_more(period)

    def _try_more(self, period: Period) -> Decision | None:
        for gain_s, name, threads in sorted(self._gains(period), reverse=True):
            if gain_s < _WORTH * period.elapsed_s:
                break
            wanted = {**self.threads, name: threads}
            if self._now >= self._retry.get(_text(wanted), (0, 0))[0]:
                why = f"the consumer waits {period.wait_s / period.elapsed_s:.0%} of the time"
                return self._begin(wanted, why)
        return None

    def _gains(self, period: Period) -> Iterator[tuple[float, str, int]]:
        """Yield the seconds that more threads would save in a period like this, the part, and its threads."""
        for name, did in period.parts.items():
            now, most = self.threads[name], self._most_threads(name, period)
            if most <= now:
                continue
            if self._settings[name].ahead == 1:  # gains only while the consumer works, too
                yield min(did.busy_s, min(self._consumer_works) * period.elapsed_s), name, 1
                continue
            # The work of the pipeline's thread without this part; more threads than keep up with it do not help.
            rest_s = period.elapsed_s - (did.awaited_s if now else did.busy_s)
            more = min(most, max(now + 1, math.ceil(did.busy_s / max(rest_s, 1e-9))))
            if self._settings[name].ahead:
                more = most
            yield period.elapsed_s - max(rest_s, did.busy_s / more), name, more

    def _most_threads(self, name: str, period: Period) -> int:
        """Return the largest number of threads to try: for a stage twice as many as now, or all if it may wait."""
        setting, now, did = self._settings[name], self.threads[name], period.parts[name]
        if setting.ahead:
            is_allowed = setting.requested or period.free_threads >= setting.ahead
            return setting.ahead if is_allowed and did.busy_s >= _PREFETCH_BLOCK_S * did.blocks else now
        cost = self.costs[name]
        if cost.largest_block_s < _STAGE_BLOCK_S:
            return now
        by_memory = period.free_bytes / max(1.0, BLOCKS_PER_THREAD * cost.block_bytes)
        most = now + int(min(period.free_threads, by_memory, 1 << 16))
        return most if period.is_idle else min(most, max(2, 2 * now))

    def _begin(self, threads: Mapping[str, int], why: str, *, comparing: bool = False) -> Decision:
        self._trial = _Trial(dict(self.threads), sum(self._speeds) / len(self._speeds), comparing)
        return self._change(threads, why)

    def _judge(self, trial: _Trial, speed: float) -> Decision | None:
        if trial.settling:  # the first period still has blocks that were made with the earlier settings
            trial.settling = False
            return None
        trial.speeds.append(speed)
        gain = sum(trial.speeds) / len(trial.speeds) / trial.speed_before - 1 if trial.speed_before else 1.0
        if gain > -_HOPELESS / len(trial.speeds) and len(trial.speeds) < _JUDGED:
            return None
        self._trial = None
        self._speeds.clear()
        if gain >= (-_LOSS if trial.comparing else _GAIN):
            self._keep(trial, gain)
            return None
        return self._take_back(trial, gain)

    def _keep(self, trial: _Trial, gain: float) -> None:
        if trial.comparing:  # threads do not help any more
            self._fail(trial.before)
        elif not any(trial.before.values()):
            self._compare_after(_COMPARE[1] if gain > _LARGE else _COMPARE[0])

    def _take_back(self, trial: _Trial, gain: float) -> Decision:
        why = f"{_text(self.threads) or 'inline'} gave {gain:+.0%}"
        if trial.comparing:
            self._compare_after(min(_COMPARE[1], 2 * self._compare_gap))
        else:
            self._fail(self.threads)
        return self._change(trial.before, why)

    def _compare_after(self, periods: int) -> None:
        self._compare_gap, self._compare_at = periods, self._now + periods

    def _fail(self, threads: Mapping[str, int]) -> None:
        """Note that `threads` did not help: try them again later, and anything else after a rest."""
        self._resting_until = self._now + _REST
        first, most = _RETRY
        gap = min(most, max(first, 2 * self._retry.get(_text(threads), (0, 0))[1]))
        self._retry[_text(threads)] = (self._now + gap, gap)

    def _change(self, threads: Mapping[str, int], why: str) -> Decision:
        changed = [f"{name} {threads_text(n)}" for name, n in sorted(threads.items()) if self.threads[name] != n]
        self.threads.update(threads)
        return Decision(dict(self.threads), f"{', '.join(changed)}: {why}")


def _text(threads: Mapping[str, int]) -> str:
    """Return the text of the parts with threads."""
    return ", ".join(f"{name} {threads_text(number)}" for name, number in sorted(threads.items()) if number)


def threads_text(number: int) -> str:
    """Format a number of threads.

    >>> threads_text(0), threads_text(1), threads_text(2)
    ('inline', '1 thread', '2 threads')
    """
    return "inline" if not number else "1 thread" if number == 1 else f"{number} threads"
