"""How long an epoch of `fit` took, and how much of that it waited for its input."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

__all__ = ["InputClock"]


@final
class InputClock:
    """Told when a batch has been drawn and when its step has been dispatched: between the two it is not waited for.

    Args:
        now: The time in seconds.

    >>> times = iter([0.0, 2.0, 3.0, 4.0, 5.0, 5.0])
    >>> clock = InputClock(lambda: next(times))
    >>> clock.begin()
    >>> clock.drawn()
    >>> clock.dispatched()
    >>> clock.drawn()
    >>> clock.waiting(), clock.seconds()
    (3.0, 5.0)
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._began = self._since = self._batch_began = 0.0
        self._waited = 0.0

    def begin(self) -> None:
        """An epoch begins."""
        self._began = self._since = self._batch_began = self._now()
        self._waited = 0.0

    def drawn(self) -> None:
        """A batch is there."""
        self._batch_began = self._now()
        self._waited += self._batch_began - self._since

    def dispatched(self) -> None:
        """Its step is on its way: the next batch is wanted."""
        self._since = self._now()

    def waiting(self) -> float:
        """Seconds of the epoch that batches were waited for."""
        return self._waited

    def seconds(self) -> float:
        """Seconds since the epoch began."""
        return self._now() - self._began

    def steps_per_second(self, steps: int) -> float:
        """Of the steps since the last batch was drawn."""
        seconds = self._now() - self._batch_began
        return steps / seconds if seconds > 0 else 0.0
