"""Whether it pays to read ahead in a thread: a function of what the blocks so far took, and of the time.

Two threads gain what the maker and the consumer of blocks can do at the same time. Whoever waits (for a disk, a device,
a clock) can do so beside the other for sure; where both compute, only a trial tells. A thread that was started is given
up again if blocks come no faster with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

__all__ = ["WORTH_S", "AheadJudge", "Lap"]

WORTH_S = 0.0002
"""What each block must gain: handing one over costs 0.1 ms."""

_SHARE = 0.15  # and its share of the time
_WATCHED = 16  # laps
_FIRST_TRIAL_S = 0.2  # before what only a trial tells: a trial that fails costs a tenth of that at most
_TRIAL_BLOCKS = 4  # that a trial has at least, for each thread
_TRIAL_S = (0.02, 0.045)  # seconds that it has at least; and after which so many blocks of one thread are enough
_GAIN = 0.03  # to be measured where only a trial tells
_LOSS = 0.05  # not to be exceeded where a gain is sure
_REST_S = (0.25, 16.0)  # after a trial that failed, doubled with each


@final
@dataclass(slots=True)
class Lap:
    """From one block that was handed out to the next, or to one after it.

    Attributes:
        rows: Elements of the blocks.
        made_s: Seconds that somebody took to make them.
        busy_s: Seconds in which their consumer did something else.
        waited_s: Of all, the seconds that took no CPU time.
        blocks: How many; one where threads make them.
    """

    rows: int = 0
    made_s: float = 0.0
    busy_s: float = 0.0
    waited_s: float = 0.0
    blocks: int = 1


@final
class AheadJudge:
    """Is told of all blocks.

    Args:
        threads: That make blocks, if any do: several gain even for a consumer that does nothing else.

    Attributes:
        is_on: Whether blocks are to be made ahead.
    """

    def __init__(self, *, threads: int = 1) -> None:
        self.is_on = False
        self._threads = threads
        self._recent: deque[Lap] = deque(maxlen=_WATCHED)
        self._began_at: float | None = None
        self._resting_until = 0.0
        self._rest_s = _REST_S[0]
        self._sure = False
        self._before = 0.0  # elements a second, before the trial
        self._trial_at: float | None = None  # when its first block was there
        self._trial_rows = self._trial_blocks = 0
        self._is_trying = False
        self._made_ahead_s = 0.0  # by threads, and not counted yet

    def made_ahead(self, seconds: float) -> None:
        """A thread made a block."""
        self._made_ahead_s += seconds

    def handed_out(self, lap: Lap, now: float) -> None:
        """The consumer has got a block."""
        if self._began_at is None:
            self._began_at = now
            return  # how long its consumer takes is not known yet
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
        """Begin a trial if that is worth it, leaving out the slowest block: something else disturbed it, perhaps."""
        if elapsed_s < _FIRST_TRIAL_S and sum([lap.waited_s for lap in self._recent]) <= WORTH_S:
            return  # whatever follows: it takes longer to find out
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
        if self._trial_at is None:  # this one waited for the thread to begin
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
        """What paid once may not do so any more: for a consumer that does nothing else now, say."""
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
