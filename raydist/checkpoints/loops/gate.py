"""Stops all replicas at the same draw, wherever each of them is when that is decided."""

from __future__ import annotations

import threading
from typing import final

from raydist.errors import DeadlineExceededError

__all__ = ["DrawGate"]


@final
class DrawGate:
    """Counts the draws of one replica's run.

    Who wants all replicas to stop asks each of them to `hold`, takes the largest number that it is told, and says it to
    all: who has not drawn so many batches yet draws them, so that nobody waits for a peer that has stopped.

    Args:
        limit_s: How long a draw may wait for that number.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._changed = threading.Condition()
        self._num_draws = 0
        self._is_held = False
        self._last: int | None = None

    def draw(self) -> bool:
        """A draw begins. Whether it must not, as the replicas stop here.

        Raises:
            DeadlineExceededError: Nobody says where they stop.
        """
        with self._changed:
            if self._is_held and not self._changed.wait_for(self._is_decided, self._limit_s):
                raise DeadlineExceededError(
                    f"The driver must say within {self._limit_s:g} s (Timeouts.step_s) at which batch replicas "
                    "stop, and has not. It may be stuck, or overloaded."
                )
            if self._last is not None and self._num_draws >= self._last:
                return True
            self._num_draws += 1
            return False

    def _is_decided(self) -> bool:
        return not self._is_held or self._last is not None

    def hold(self) -> int:
        """Let no further draw begin until `stop_after` or `go_on`; how many have begun. Any thread may call this."""
        with self._changed:
            self._is_held = True
            return self._num_draws

    def stop_after(self, num_draws: int) -> None:
        """Stop once so many draws have begun."""
        with self._changed:
            self._last = num_draws
            self._changed.notify_all()

    def go_on(self) -> None:
        """Do not stop after all."""
        with self._changed:
            self._is_held = False
            self._changed.notify_all()
