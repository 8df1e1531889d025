"""Where the program's threads wait for the coordinator's: with its lock, and with a limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import final

from raydist.coordinator.closures import ClosureQueue
from raydist.coordinator.workforce import Workforce
from raydist.errors import DeadlineExceededError, FailedPreconditionError
from raydist.options import Timeouts

__all__ = ["ClosureWaits"]

_SLICE_S = 0.5  # between two looks at the clock


@final
class ClosureWaits:
    """See the module.

    Args:
        force: Who works.
        queue: What there is to do.
        timeouts: The limit of every wait.

    Attributes:
        changed: The lock around all that the threads share, told of each change.
        is_closed: Nobody shall wait any more.
    """

    def __init__(self, force: Workforce, queue: ClosureQueue, timeouts: Timeouts) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.is_closed = False
        self._force = force
        self._queue = queue
        self._timeouts = timeouts

    def wait_until(self, holds: Callable[[], bool], what: str, timeout_s: float | None = None) -> None:
        """Wait for the other thread, with the lock.

        Args:
            holds: Whether there is nothing to wait for any more.
            what: Is waited for, for the error.
            timeout_s: How long; None: until no closure has ended for `Timeouts.step_s`.

        Raises:
            DeadlineExceededError: It has not come in time.
        """
        limit_s, named = (self._timeouts.step_s, "Timeouts.step_s") if timeout_s is None else (timeout_s, "timeout")
        end, progress = time.monotonic() + limit_s, self._force.num_ended
        while not holds():
            left = end - time.monotonic()
            if timeout_s is None and progress != self._force.num_ended:
                end, progress = time.monotonic() + limit_s, self._force.num_ended
            elif left <= 0:
                raise self._too_late(what, limit_s, named)
            self.changed.wait(min(max(left, 0.0), _SLICE_S))

    def _too_late(self, what: str, limit_s: float, named: str) -> DeadlineExceededError:
        busy = ", ".join(self._force.titles_of_busy()) or "no worker has anything to do"
        return DeadlineExceededError(
            f"Waiting for {what} must end within {limit_s:g} s ({named}), but {self._queue.num_open} closures have not "
            f"ended. At work: {busy}. A function may be stuck, or take longer: give join a longer timeout, or raise "
            "Timeouts.step_s. Nothing was cancelled."
        )

    def require_open(self) -> None:
        """Raise where it is closed.

        Raises:
            FailedPreconditionError: It is.
        """
        if self.is_closed:
            raise FailedPreconditionError(
                "The strategy must be open to schedule closures, it was closed. Create a new strategy."
            )
