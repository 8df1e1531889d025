"""BoundedStaleness: who may begin a closure, and who has to wait for the slowest. Pure."""

from __future__ import annotations

from typing import final

__all__ = ["Clocks"]


@final
class Clocks:
    """How many closures each worker has begun, as far as that counts.

    A worker that comes (back) without a clock of its own that counts gets that of the slowest: it has missed nothing,
    since it reads everything anew.

    Args:
        bound: How many closures a worker may be ahead of the slowest one.

    >>> clocks = Clocks(bound=1)
    >>> for worker in (0, 1, 0, 0):
    ...     clocks.begin(worker)
    >>> clocks.may_read(0), clocks.may_read(1)
    (False, True)
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._clocks: dict[int, int] = {}
        self._slowest = 0  # of those that counted last: never falls

    def begin(self, worker: int) -> None:
        """A worker begins a closure; one before it has ended with that."""
        if worker in self._clocks:
            self._clocks[worker] += 1
        else:
            self._clocks[worker] = self._slowest
        self._settle()

    def end(self, worker: int) -> None:
        """A worker holds no closure any more, or is dead: nobody waits for it."""
        self._clocks.pop(worker, None)
        self._settle()

    def may_read(self, worker: int) -> bool:
        """Whether what this worker reads now is new enough."""
        return self._clocks.get(worker, self._slowest) - self._slowest <= self._bound

    def _settle(self) -> None:
        self._slowest = min(self._clocks.values(), default=self._slowest)
