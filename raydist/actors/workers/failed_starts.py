"""How many workers may die while they start before something else must be wrong."""

from __future__ import annotations

from typing import final

from raydist.actors.supervision import first_line
from raydist.errors import UnavailableError

__all__ = ["FailedStarts"]

_MOST = 20  # in a row: killed from outside, every second one would be, once in a million
_MOST_ERRORS = 3  # that its own constructor raised: it will again
_OWN_ERROR = "creation task"  # what Ray says then


@final
class FailedStarts:
    """Workers of a pool that died while they started, one behind the other. One that runs ends the row."""

    def __init__(self) -> None:
        self._num = 0

    def end(self) -> None:
        """A worker runs."""
        self._num = 0

    def add(self, worker: str, error: Exception) -> None:
        """A worker died before it ran.

        Raises:
            UnavailableError: So did too many before it.
        """
        self._num += 1
        if self._num < (_MOST_ERRORS if _OWN_ERROR in str(error) else _MOST):
            return
        raise UnavailableError(
            f"Input worker {worker} is gone while starting, as were the {self._num - 1} before it: {first_line(error)} "
            "Their processes may have been killed, or have run out of memory. Iterate again, or load the last saved "
            "state.",
            actor=worker,
        ) from error
