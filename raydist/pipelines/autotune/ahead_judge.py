"""The decision to prefetch in a thread: a function of the durations of blocks, and of the time.

Two threads gain when the producer and the consumer of blocks can work at the same time. Waits (for a disk, a device, a
clock) certainly overlap with other work; where both compute, only a trial shows the gain. A prefetch thread is given up
again if blocks come no faster with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

__all__ = ["WORTH_S", "AheadJudge", "Lap"]

WORTH_S = 0.0002
"""Gain in seconds that each block must promise: handing a block over costs 0.1 ms."""

_SHARE = 0.15  # and the share of the time that it must promise
_WATCHED = 16  # laps
_FIRST_TRIAL_S = 0.2  # before any gain that only a trial shows: a failed trial costs a tenth of that at most
_TRIAL_BLOCKS = 4  # minimum for each thread in a trial
_TRIAL_S = (0.02, 0.045)  # minimum duration; and the duration after which the blocks of one thread are enough
_GAIN = 0.03  # to be measured where only a trial shows it
_LOSS = 0.05  # limit where a gain is certain
_REST_S = (0.25, 16.0)  # after a failed trial, doubled with each


@final
@dataclass(slots=True)
class Lap:
    """The time from one handed-out block to the next, or to a later one.

    Attributes:
        rows: Elements of the blocks.
        made_s: Seconds that making the blocks took, in any thread.
        busy_s: Seconds that the consumer did something else.
        waited_s: Seconds of the total without use of the CPU.
        blocks: Number of blocks; one if threads make them.
    """

    rows: int = 0
    made_s: float = 0.0
    busy_s: float = 0.0
    waited_s: float = 0.0
    blocks: int = 1


@final
class AheadJudge:
    """A policy that decides, from all blocks, if a thread prefetches.

    Args:
        threads: Threads that would make blocks: several gain even if the consumer does nothing else.

    Attributes:
        is_on: True if blocks are to be prefetched.
    """

    def __init__(self, *, threads: int = 1) -> None:
        self.is_on = False
        self._threads = threads
        self._recent: deque[Lap] = deque(maxlen=_WATCHED)
        self._began_at: float | None = None
        self._resting_until = 0.0
        self._rest_s = _REST_S[0]
        self._sure = False
        self._before = 0.0  # elements per second before the trial
        self._trial_at: float | None = None  # time of its first block
        self._trial_rows = self._trial_blocks = 0
        self._is_trying = False
        self._made_ahead_s = 0.0  # by threads, not counted yet

    def made_ahead(self, seconds: float) -> None:
        """Note that a thread made a block."""
        self._made_ahead_s += seconds

    def handed_out(self, lap: Lap, now: float) -> None:
        """Note that the consumer received a block."""
        if self._began_at is None:
            self._began_at = now
            return  # the time of the consumer is not known yet
        if self._is_trying:
            self._try_on(lap, now)
            return
        self._recent.append(lap)
        if self.is_on:
            lap.made_s, self._made_ahead_s = self._made_ahead_s, 0.0
            self._watch(now)
        elif lap.made_s > WORTH_S and now >= self._resting_until:
            self._look(now, now - self._began_at)

    def _look(self, now: float, elapsed_s: float) -> None:
        """Begin a trial if it may pay. Ignores the slowest block, which something else may have disturbed."""
        if elapsed_s < _FIRST_TRIAL_S and sum([lap.waited_s for lap in self._recent]) <= WORTH_S:
            return  # without a wait, only a trial shows the gain, and it is too early for one
        laps = sorted(self._recent, key=lambda lap: lap.made_s)[:-1]
        gain_s = self._possible_gain(laps)
        if not _is_worth(laps, gain_s):
            return
        self._sure = _is_worth(laps, min(gain_s, sum([lap.waited_s for lap in laps])))
        if self._sure or elapsed_s >= _FIRST_TRIAL_S:
            self._before = sum([lap.rows for lap in self._recent]) / sum(map(_seconds, self._recent))
            self._is_trying, self._trial_at, self._trial_rows, self._trial_blocks = True, None, 0, 0
            self.is_on = True

    def _possible_gain(self, laps: Sequence[Lap]) -> float:
        made_s = sum([lap.made_s for lap in laps])
        return made_s if self._threads > 1 else min(made_s, sum([lap.busy_s for lap in laps]))

    def _try_on(self, lap: Lap, now: float) -> None:
        if self._trial_at is None:  # this block waited for the start of the thread
            self._trial_at = now
            return
        self._trial_rows += lap.rows
        self._trial_blocks += 1
        elapsed_s = now - self._trial_at
        least_s, enough_s = _TRIAL_S
        least_blocks = _TRIAL_BLOCKS * (1 if elapsed_s >= enough_s else self._threads)
        if self._trial_blocks < least_blocks or elapsed_s < least_s:
            return
        self._is_trying, self._made_ahead_s = False, 0.0
        self._recent.clear()
        if self._trial_rows / elapsed_s / self._before - 1 < (-_LOSS if self._sure else _GAIN):
            self._give_up(now)
        else:
            self._rest_s = _REST_S[0]

    def _watch(self, now: float) -> None:
        """Give up prefetching once it no longer pays, such as when the consumer does nothing else any more."""
        if len(self._recent) < _WATCHED:
            return
        if 2 * self._possible_gain(self._recent) < WORTH_S * _WATCHED:
            self._give_up(now)
        self._recent.clear()

    def _give_up(self, now: float) -> None:
        self.is_on = False
        self._recent.clear()
        self._resting_until = now + self._rest_s
        self._rest_s = min(_REST_S[1], 2 * self._rest_s)


def _is_worth(laps: Sequence[Lap], gain_s: float) -> bool:
    return gain_s > WORTH_S * sum([lap.blocks for lap in laps]) and gain_s >= _SHARE * sum(map(_seconds, laps))


def _seconds(lap: Lap) -> float:
    return lap.made_s + lap.busy_s
