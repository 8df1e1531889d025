"""The driver's handle of a save dispatched to replicas. Any thread may wait for the save beside training."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import final

from raydist.actors.portable_errors import PortableError
from raydist.actors.supervision import root_cause
from raydist.checkpoints.sharing.shares import Share
from raydist.errors import DeadlineExceededError

__all__ = ["DispatchedSave"]

_SHORTEST_S, _LONGEST_S = 0.005, 0.1  # between two polls
_GRACE_S = 1.0  # after a first failure: time for the other replicas to report the cause


@final
class DispatchedSave:
    """A save whose shares replicas copy after the work dispatched before, and then write.

    Args:
        ask: Returns the progress of the save on each replica. Thread-safe.
        limit_s: Limit in seconds for all replicas to finish writing.
    """

    def __init__(self, ask: Callable[[], Sequence[Share | PortableError | None]], limit_s: float) -> None:
        self._ask = ask
        self._limit_s = limit_s
        self.is_done = False
        """True once a caller of `wait` has returned or failed."""

    def wait(self) -> Sequence[Share]:
        """Block until all replicas have written; return their shares in rank order. Raise the cause of a failure."""
        try:
            return self._wait()
        finally:
            self.is_done = True

    def _wait(self) -> Sequence[Share]:
        end, pause_s, failed_at = time.monotonic() + self._limit_s, _SHORTEST_S, 0.0
        while True:
            answers = self._ask()
            shares = [each for each in answers if isinstance(each, Share)]
            if len(shares) == len(answers):
                return shares
            failures = [each for each in answers if isinstance(each, PortableError)]
            now = time.monotonic()
            failed_at = failed_at or (now if failures else 0.0)
            if failures and (len(failures) + len(shares) == len(answers) or now > failed_at + _GRACE_S):
                raise root_cause([each.restore() for each in failures])
            if now > end:
                raise DeadlineExceededError(
                    f"A save must be written within {self._limit_s:g} s, but {len(answers) - len(shares)} of "
                    f"{len(answers)} replicas have not. Raise Timeouts.step_s."
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)
