"""Waits of the program's threads for the coordinator's thread, under its lock and with a time limit."""

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
    """The condition on which the program's threads wait for the coordinator's thread.

    Args:
        force: The scheduler of the workers.
        queue: The queue of closures.
        timeouts: The limit of every wait.

    Attributes:
        changed: The lock around all state that the threads share; notified of each change.
        is_closed: The strategy was closed: no thread may wait any more.
    """

    def __init__(self, force: Workforce, queue: ClosureQueue, timeouts: Timeouts) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.is_closed = False
        self._force = force
        self._queue = queue
        self._timeouts = timeouts

    def wait_until(self, holds: Callable[[], bool], what: str, timeout_s: float | None = None) -> None:
        """Block until `holds()` is true; the caller holds the lock.

        Args:
            holds: Returns True once the wait is over.
            what: Describes in the error what the caller waits for.
            timeout_s: Time limit; None: until no closure has ended for `Timeouts.step_s`.

        Raises:
            DeadlineExceededError: `holds()` stayed false for the time limit.
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
        """Raise if the strategy was closed.

        Raises:
            FailedPreconditionError: The strategy was closed.
        """
        if self.is_closed:
            raise FailedPreconditionError(
                "The strategy must be open to schedule closures, it was closed. Create a new strategy."
            )
