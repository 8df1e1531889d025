"""A limit on the number of workers that die while they start."""

from __future__ import annotations

from typing import final

from raydist.actors.supervision import first_line
from raydist.errors import UnavailableError

__all__ = ["FailedStarts"]

_MOST = 20  # in a row: if every second start is killed from outside, this happens once in a million
_MOST_ERRORS = 3  # errors of the worker's constructor, which will repeat
_OWN_ERROR = "creation task"  # part of Ray's message for an error of the constructor


@final
class FailedStarts:
    """The number of a pool's workers that died in a row while they started."""

    def __init__(self) -> None:
        self._num = 0

    def end(self) -> None:
        """Reset the count because a worker runs."""
        self._num = 0

    def add(self, worker: str, error: Exception) -> None:
        """Count a worker that died before it ran.

        Raises:
            UnavailableError: Too many workers in a row died.
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
