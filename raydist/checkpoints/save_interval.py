"""The rule that decides when a checkpoint is due. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from raydist.errors import InvalidArgumentError

__all__ = ["SaveInterval"]


@final
@dataclass(frozen=True, slots=True)
class SaveInterval:
    """Interval between two saves: steps or seconds, whichever passes first. Without either, each call saves.

    Attributes:
        steps: Number of steps, by the step counter.
        seconds: Seconds of a monotonic clock.

    >>> every = SaveInterval(steps=500)
    >>> every.is_due(499, since_step=0, seconds=1e9), every.is_due(500, since_step=0, seconds=0)
    (False, True)
    """

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and (type(self.steps) is not int or self.steps < 1):
            raise InvalidArgumentError(f"checkpoint_interval must be a number of steps >= 1, got {self.steps!r}.")
        if self.seconds is not None and not (isinstance(self.seconds, int | float) and self.seconds > 0):
            raise InvalidArgumentError(f"interval_s must be a number of seconds > 0, got {self.seconds!r}.")

    def is_due(self, step: int, *, since_step: int | None, seconds: float) -> bool:
        """Return True if a checkpoint is due.

        Args:
            step: Value of the step counter.
            since_step: Value at the last save; None if unknown: then a checkpoint is due by steps.
            seconds: Seconds since the last save.
        """
        if self.steps is None and self.seconds is None:
            return True
        by_steps = self.steps is not None and (since_step is None or step - since_step >= self.steps)
        return by_steps or (self.seconds is not None and seconds >= self.seconds)
