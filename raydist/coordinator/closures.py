"""The queue of closures: which of them wait, run and have ended. Pure: nothing here waits or sends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, final

from raydist.errors import CancelledError, UnavailableError
from raydist.replicas.results import StepResult
from raydist.replicas.served.work_message import PlannedWork

__all__ = ["Closure", "ClosureQueue"]

_MOST_DEATHS = 5  # of workers, in the same closure: then it is what kills them


@final
class Closure:
    """A function call that is to happen once, on whichever worker is free. Results hold it, so it lets go of its work.

    Attributes:
        number: Unique in the strategy, and rising.
        key: Of the function, by which closures of about the same length are known.
        work: What a worker is sent; None once it has ended.
        deaths: How many workers have died in it.
        ended: Whether it is known how it ended.
        result: What it returned.
        value: That, once it was unpacked.
        error: Why it has no result.
        alone: Nothing runs anywhere beside it: all before it have ended, none behind it has begun.
        boundary: Of the program, at which it was scheduled.
    """

    __slots__ = ("alone", "boundary", "deaths", "ended", "error", "key", "number", "result", "value", "work")

    def __init__(
        self, number: int, work: PlannedWork, key: bytes = b"", *, alone: bool = False, boundary: int = 0
    ) -> None:
        self.number = number
        self.alone = alone
        self.boundary = boundary
        self.key = key
        self.work: PlannedWork | None = work
        self.deaths = 0
        self.ended = False
        self.result: StepResult | None = None
        self.value: Any = None
        self.error: Exception | None = None


@final
class ClosureQueue:
    """All closures of a strategy that have not ended. Its owner sees to it that one thread is in here at a time.

    Under `rd.BoundedStaleness` it also keeps the workers' clocks (Ho et al. 2013). A worker's clock counts the closures
    that the worker has finished since the queue was last empty. Closures that run alone (saves) are not counted.

    Args:
        max_clocks: How far a worker's clock may be ahead of the smallest one when it begins a closure; None: no limit.

    Attributes:
        error: The first error that the program has not been told of.
        epoch: How many errors it has been told of.
    """

    def __init__(self, max_clocks: int | None = None) -> None:
        self.error: Exception | None = None
        self.epoch = 0
        self._max_clocks = max_clocks
        self._clocks: dict[int, int] = {}
        self._next_number = 0
        self._last_begun = -1
        self._open: dict[int, Closure] = {}
        self._waiting: deque[Closure] = deque()
        self._running: dict[int, deque[Closure]] = {}

    def next_number(self) -> int:
        """A number that nothing else gets."""
        self._next_number += 1
        return self._next_number - 1

    @property
    def finished_below(self) -> int:
        """All closures with a lower number have ended, and what has such a number and is none of them, too."""
        return next(iter(self._open), self._next_number)

    @property
    def num_waiting(self) -> int:
        """Closures that no worker has."""
        return len(self._waiting)

    @property
    def num_open(self) -> int:
        """Closures that have not ended."""
        return len(self._open)

    @property
    def num_running(self) -> int:
        """Closures that workers have."""
        return len(self._open) - len(self._waiting)

    def running_on(self, worker: int) -> tuple[Closure, ...]:
        """Those that a worker has, in the order in which it does them."""
        return tuple(self._running.get(worker, ()))

    def add(self, closure: Closure) -> None:
        """It waits, behind all others."""
        self._open[closure.number] = closure
        self._waiting.append(closure)

    def peek(self) -> Closure | None:
        """The one that is next."""
        return self._waiting[0] if self._waiting else None

    @property
    def may_begin(self) -> bool:
        """Whether the next one may run beside those that do."""
        if not self.num_running:
            return True
        coming = self.peek()
        if coming is not None and coming.alone:
            return False
        return self.num_running > 1 or not any(each.alone for had in self._running.values() for each in had)

    def capacity_of(self, worker: int, living: Sequence[int]) -> int | None:
        """Return how many closures the worker may be given now; None: as many as there are.

        A worker does its closures one after the other, so the last of those that it holds begins when its clock has
        counted all before it. The smallest clock never falls: what is allowed now is allowed when the closure begins.

        Args:
            worker: One of `living`.
            living: The workers that can be given closures. One that is new starts at the smallest clock.
        """
        if self._max_clocks is None:
            return None
        slowest = min((self._clocks[each] for each in living if each in self._clocks), default=0)
        for each in living:
            self._clocks.setdefault(each, slowest)
        begun = self._clocks[worker] + len(self._running.get(worker, ()))
        return max(0, slowest + self._max_clocks + 1 - begun)

    def take(self, worker: int) -> Closure:
        """Give the next one to a worker."""
        closure = self._waiting.popleft()
        self._last_begun = max(self._last_begun, closure.number)
        self._running.setdefault(worker, deque()).append(closure)
        return closure

    def put_back(self, worker: int, closures: Sequence[Closure]) -> None:
        """A worker does not get them after all: they are next."""
        for closure in reversed(closures):
            self._running[worker].remove(closure)
            self._waiting.appendleft(closure)

    def succeed(self, worker: int, closure: Closure, result: StepResult) -> None:
        """A worker has done it."""
        self._end(worker, closure)
        closure.result = result

    def fail(self, worker: int, closure: Closure, error: Exception) -> None:
        """It raised: nothing that waits will be begun."""
        self._end(worker, closure)
        closure.error = error
        self.fail_all(error)

    def cancel(self, worker: int, closure: Closure) -> None:
        """A worker gave it up, because one before it raised."""
        self._end(worker, closure)
        closure.error = self._cancelled(closure)

    def fail_all(self, error: Exception) -> None:
        """The program is to be told of `error`, unless it is to be told of another; all that waits is cancelled."""
        self.error = self.error or error
        waiting, self._waiting = self._waiting, deque()
        for closure in waiting:
            self._forget(closure)
            closure.error = self._cancelled(closure)

    def _cancelled(self, closure: Closure) -> CancelledError:
        cause = "another one" if self.error is None else type(self.error).__name__
        cancelled = CancelledError(
            f"Closure {closure.number} was cancelled before it began, because a closure before it failed ({cause}: see "
            "the error that join, schedule, done or fetch has raised). Please reschedule it."
        )
        cancelled.__cause__ = self.error
        return cancelled

    def lost(self, worker: int, error: Exception) -> None:
        """A worker has died: what it had is next, in the same order. One that has killed many fails."""
        orphans = self._running.pop(worker, deque())
        self._clocks.pop(worker, None)
        if orphans:
            orphans[0].deaths += 1
        if self.error is not None:  # the program is to be told: nothing is begun any more
            self._drop(orphans)
            return
        self._waiting.extendleft(reversed(orphans))
        if orphans and orphans[0].deaths >= _MOST_DEATHS:
            self._waiting.popleft()
            self._forget(orphans[0])
            orphans[0].error = _deadly(orphans[0], error)
            self.fail_all(orphans[0].error)

    def _drop(self, closures: Iterable[Closure]) -> None:
        for closure in closures:
            self._forget(closure)
            closure.error = self._cancelled(closure)

    def give_up_from(self, boundary: int, error: Exception) -> list[Closure]:
        """Take back what was scheduled at this boundary or later, and behind all that was begun or is alone."""
        last = max([self._last_begun, *(each.number for each in self._waiting if each.alone)])
        given_up = [each for each in self._waiting if each.number > last and each.boundary >= boundary]
        for closure in given_up:
            self._waiting.remove(closure)
            self._forget(closure)
            closure.error = error
        return given_up

    def abandon(self, error: Exception) -> None:
        """Nobody will do anything any more."""
        self.error = self.error or error
        for closure in list(self._open.values()):
            self._forget(closure)
            closure.error = error
        self._waiting.clear()
        self._running.clear()
        self._clocks.clear()

    def take_error(self) -> Exception | None:
        """The error that the program is told of now; what it schedules from now on is begun again."""
        error, self.error = self.error, None
        self.epoch += error is not None
        return error

    def _end(self, worker: int, closure: Closure) -> None:
        self._running[worker].remove(closure)
        if worker in self._clocks and not closure.alone:
            self._clocks[worker] += 1
        self._forget(closure)

    def _forget(self, closure: Closure) -> None:
        del self._open[closure.number]
        if not self._open:
            self._clocks.clear()
        closure.work = None
        closure.ended = True


def _deadly(closure: Closure, error: Exception) -> UnavailableError:
    return UnavailableError(
        f"Closure {closure.number} must leave its worker alive, but {closure.deaths} workers died while they had it; "
        f"the last one: {error} It may need more memory than a worker has (resources_per_replica), or crash."
    )
