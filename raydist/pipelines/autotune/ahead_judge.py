"""Whether it pays to read ahead in a thread: a function of what the blocks so far took, and of the time.

Two threads gain what the maker and the consumer of blocks can do at the same time. Whoever waits (for a disk, a device,
a clock) can do so beside the other for sure; where both compute, only a trial tells. A thread that was started is given
up again if blocks come no faster with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

__all__ = ["AheadJudge", "Lap"]

_WORTH_S = 0.0002  # what each block must gain: handing one over costs 0.1 ms
_SHARE = 0.15  # and its share of the time
_AT_ONCE_S = 0.005  # a gain that is worth not waiting for a second block
_WATCHED = 16  # blocks after which the past counts half
_FIRST_TRIAL_S = 0.2  # before what only a trial tells: a trial that fails costs a tenth of that at most
_TRIAL_BLOCKS = 4  # that a trial has at least, for each thread
_TRIAL_S = (0.02, 0.045)  # seconds that it has at least; and after which so many blocks of one thread are enough
_GAIN = 0.03  # to be measured where only a trial tells
_LOSS = 0.05  # not to be exceeded where a gain is sure
_REST_S = (0.25, 16.0)  # after a trial that failed, doubled with each


@final
@dataclass(slots=True)
class Lap:
    """From one block that was handed out to the next, or several such.

    Attributes:
        rows: Elements of the block.
        made_s: Seconds that somebody took to make it.
        busy_s: Seconds in which its consumer did something else.
        waited_s: Of these, the seconds that took no CPU time.
        blocks: How many.
    """

    rows: int = 0
    made_s: float = 0.0
    busy_s: float = 0.0
    waited_s: float = 0.0
    blocks: int = 1

    def add(self, other: Lap) -> None:
        """Count `other` too."""
        self.rows += other.rows
        self.made_s += other.made_s
        self.busy_s += other.busy_s
        self.waited_s += other.waited_s
        self.blocks += other.blocks

    def halve(self) -> None:
        """Let what was so far count half."""
        self.rows, self.blocks = self.rows // 2, self.blocks // 2
        self.made_s, self.busy_s, self.waited_s = self.made_s / 2, self.busy_s / 2, self.waited_s / 2


@final
class AheadJudge:
    """Is told of every block.

    Args:
        threads: That make blocks, if any do: several gain even for a consumer that does nothing else.

    Attributes:
        is_on: Whether blocks are to be made ahead.
    """

    def __init__(self, *, threads: int = 1) -> None:
        self.is_on = False
        self._threads = threads
        self._recent = Lap(blocks=0)
        self._began_at: float | None = None
        self._resting_until = 0.0
        self._rest_s = _REST_S[0]
        self._sure = False
        self._before = 0.0  # elements a second, before the trial
        self._trial: Lap | None = None
        self._trial_at: float | None = None  # when its first block was there

    def made_ahead(self, seconds: float) -> None:
        """A thread made a block."""
        self._recent.made_s += seconds

    def handed_out(self, lap: Lap, now: float) -> None:
        """The consumer has got a block."""
        if self._began_at is None:
            self._began_at = now
            return  # how long its consumer takes is not known yet
        if self._trial is not None:
            self._try_on(self._trial, lap, now)
            return
        self._recent.add(lap)
        if self.is_on:
            self._watch(now)
        else:
            self._look(self._recent, now, now - self._began_at)
        if self._recent.blocks >= _WATCHED:
            self._recent.halve()

    def _look(self, recent: Lap, now: float, elapsed_s: float) -> None:
        gain_s = self._possible_gain(recent)
        if not self._is_worth(recent, gain_s) or now < self._resting_until:
            return
        self._sure = self._is_worth(recent, min(gain_s, recent.waited_s))
        if self._sure or elapsed_s >= _FIRST_TRIAL_S:
            self._before = recent.rows / (recent.made_s + recent.busy_s)
            self._trial, self._trial_at = Lap(blocks=0), None
            self.is_on = True

    def _possible_gain(self, recent: Lap) -> float:
        return recent.made_s if self._threads > 1 else min(recent.made_s, recent.busy_s)

    def _is_worth(self, recent: Lap, gain_s: float) -> bool:
        if gain_s < _SHARE * (recent.made_s + recent.busy_s):
            return False
        return gain_s > _WORTH_S * recent.blocks if recent.blocks > 1 else gain_s > _AT_ONCE_S

    def _try_on(self, trial: Lap, lap: Lap, now: float) -> None:
        if self._trial_at is None:  # this one waited for the thread to begin
            self._trial_at = now
            return
        trial.add(lap)
        elapsed_s = now - self._trial_at
        least_s, enough_s = _TRIAL_S
        least_blocks = _TRIAL_BLOCKS * (1 if elapsed_s >= enough_s else self._threads)
        if trial.blocks < least_blocks or elapsed_s < least_s:
            return
        gain = trial.rows / elapsed_s / self._before - 1
        self._trial, self._recent = None, Lap(blocks=0)
        if gain < (-_LOSS if self._sure else _GAIN):
            self._give_up(now)
        else:
            self._rest_s = _REST_S[0]

    def _watch(self, now: float) -> None:
        """What paid once may not do so any more: for a consumer that does nothing else now, say."""
        recent = self._recent
        if recent.blocks >= _WATCHED and 2 * self._possible_gain(recent) < _WORTH_S * recent.blocks:
            self._give_up(now)

    def _give_up(self, now: float) -> None:
        self.is_on = False
        self._recent = Lap(blocks=0)
        self._resting_until = now + self._rest_s
        self._rest_s = min(_REST_S[1], 2 * self._rest_s)
