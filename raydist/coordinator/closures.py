"""Closures: the header that a worker gets, and the queue of those that wait, run and have ended. Nothing here waits."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from raydist.context.seed_calls import num_seed_calls
from raydist.core.errors import CancelledError, UnavailableError
from raydist.core.values import ReduceOp
from raydist.mirroring.messages import StepPayload
from raydist.options import RunOptions
from raydist.replicas.ps.work_message import PlannedWork
from raydist.replicas.results import StepResult
from raydist.replicas.step import StepHeader, batch_rows
from raydist.summary.recording import SummaryOrder
from raydist.utils.torch_modes import TorchModes

_MOST_DEATHS = 5  # workers that died in the same closure: then the closure is taken to kill them


@final
@dataclass(slots=True, eq=False)
class Closure:
    """A call that runs once, on whichever worker is free. Results hold it, so it drops its work when it ends."""

    number: int  # unique in the strategy, and rising
    work: PlannedWork | None  # the message to the worker; None once the closure has ended
    key: bytes = b""  # identifies the function; closures of one function take about the same time
    alone: bool = False  # no other closure runs at the same time: all earlier ones have ended, no later one has begun
    boundary: int = 0  # the step boundary of the program at which the closure was scheduled
    deaths: int = 0  # number of workers that died while they ran the closure
    ended: bool = False  # True once the outcome is known
    result: StepResult | None = None  # the packed return value
    value: Any = None  # the unpacked return value
    error: Exception | None = None  # the exception with which the closure ended, if any


@final
class ClosureQueue:
    """All closures of a strategy that have not ended. The owner lets only one thread at a time call this object.

    Under `rd.BoundedStaleness` it also keeps the workers' clocks (Ho et al. 2013). A worker's clock counts the closures
    that the worker has finished since the queue was last empty. Closures that run alone (saves) are not counted.

    Args:
        max_clocks: How far a worker's clock may be ahead of the smallest one when it begins a closure; None: no limit.
    """

    def __init__(self, max_clocks: int | None = None) -> None:
        self.error: Exception | None = None  # the first error that was not raised in the program yet
        self.epoch = 0  # number of errors that were raised in the program
        self.lost_server: Exception | None = None  # the error of a dead server; nothing is sent until `resume`
        self.num_resumed = 0  # number of calls of `resume`
        self._interrupted: list[Closure] = []  # closures that raised the error of a dead server, and wait again
        self._max_clocks = max_clocks
        self._clocks: dict[int, int] = {}
        self._next_number = 0
        self._last_begun = -1
        self._open: dict[int, Closure] = {}
        self._waiting: deque[Closure] = deque()
        self._running: dict[int, deque[Closure]] = {}

    def next_number(self) -> int:
        """Return a number that no other closure gets."""
        self._next_number += 1
        return self._next_number - 1

    @property
    def finished_below(self) -> int:
        """A bound: all closures with a lower number have ended, and so has all else that drew a lower number."""
        return next(iter(self._open), self._next_number)

    @property
    def num_waiting(self) -> int:
        """Number of closures that no worker has."""
        return len(self._waiting)

    @property
    def num_open(self) -> int:
        """Number of closures that have not ended."""
        return len(self._open)

    @property
    def num_running(self) -> int:
        """Number of closures that workers have."""
        return len(self._open) - len(self._waiting)

    def running_on(self, worker: int) -> tuple[Closure, ...]:
        """Return the closures that a worker has, in the order in which it runs them."""
        return tuple(self._running.get(worker, ()))

    def add(self, closure: Closure) -> None:
        """Append a closure to the queue."""
        self._open[closure.number] = closure
        self._waiting.append(closure)

    def peek(self) -> Closure | None:
        """Return the closure that is next, or None."""
        return self._waiting[0] if self._waiting else None

    @property
    def may_begin(self) -> bool:
        """True if the next closure may run beside the running ones."""
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
        """Give the next closure to a worker."""
        closure = self._waiting.popleft()
        self._last_begun = max(self._last_begun, closure.number)
        self._running.setdefault(worker, deque()).append(closure)
        return closure

    def put_back(self, worker: int, closures: Sequence[Closure]) -> None:
        """Requeue closures that a worker was not sent, or has not done."""
        for closure in closures:
            self._running[worker].remove(closure)
        self._wait_again(closures)

    def _wait_again(self, closures: Iterable[Closure]) -> None:
        self._waiting = deque(sorted((*closures, *self._waiting), key=lambda each: each.number))

    def succeed(self, worker: int, closure: Closure, result: StepResult) -> None:
        """Record the result of a closure."""
        self._end(worker, closure)
        closure.result = result

    def fail(self, worker: int, closure: Closure, error: Exception) -> None:
        """Record that a closure raised, and cancel all closures that wait."""
        self._end(worker, closure)
        closure.error = error
        self.fail_all(error)

    def skip(self, worker: int, closure: Closure) -> None:
        """Record that a worker skipped a closure because an earlier one raised."""
        if self.error is None and self.lost_server is not None:  # it raised the error of a server that is replaced
            self.put_back(worker, [closure])
        else:
            self._cancel(worker, closure)

    def _cancel(self, worker: int, closure: Closure) -> None:
        self._end(worker, closure)
        closure.error = self._cancelled(closure)

    def fail_all(self, error: Exception) -> None:
        """Cancel all waiting closures. The program gets `error`, unless an earlier error is pending."""
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

    def requeue(self, worker: int) -> Sequence[Closure]:
        """Requeue a worker's closures; return them. What waits is in the order in which it was scheduled."""
        orphans = self._running.pop(worker, deque())
        self._clocks.pop(worker, None)
        if self.error is not None:  # the program is about to get the error: nothing begins until then
            self._drop(orphans)
            return ()
        self._wait_again(orphans)
        return orphans

    def lost(self, worker: int, error: Exception) -> None:
        """Requeue a dead worker's closures. A closure in which many workers died fails."""
        orphans = self.requeue(worker)
        if orphans:
            orphans[0].deaths += 1
        if orphans and orphans[0].deaths >= _MOST_DEATHS:
            self._waiting.remove(orphans[0])
            self._forget(orphans[0])
            orphans[0].error = _deadly(orphans[0], error)
            self.fail_all(orphans[0].error)

    def _drop(self, closures: Iterable[Closure]) -> None:
        for closure in closures:
            self._forget(closure)
            closure.error = self._cancelled(closure)

    def interrupt(self, error: Exception, worker: int = 0, closures: Sequence[Closure] = ()) -> None:
        """Send nothing more until `resume` or `give_up`, because a server is gone.

        Args:
            error: The error that names the server.
            worker: The worker that has `closures`.
            closures: Closures that wait again: the first one raised the error, and the others were skipped.
        """
        self.lost_server = self.lost_server or error
        if self.error is not None:  # as in `requeue`
            for closure in closures:
                self._cancel(worker, closure)
        elif closures:
            self.put_back(worker, closures)
            self._interrupted.append(closures[0])

    def resume(self) -> None:
        """Send closures again, because all servers are there again."""
        self.lost_server = None
        self._interrupted.clear()
        self.num_resumed += 1

    def give_up(self, error: Exception) -> None:
        """End the closures that were interrupted with `error`, and cancel those that wait."""
        for closure in self._interrupted:
            if not closure.ended:
                self._waiting.remove(closure)
                self._forget(closure)
                closure.error = error
        self.resume()
        self.fail_all(error)

    def give_up_from(self, boundary: int, error: Exception) -> list[Closure]:
        """Withdraw closures scheduled at this boundary or later, behind all that have begun or run alone."""
        last = max([self._last_begun, *(each.number for each in self._waiting if each.alone)])
        given_up = [each for each in self._waiting if each.number > last and each.boundary >= boundary]
        for closure in given_up:
            self._waiting.remove(closure)
            self._forget(closure)
            closure.error = error
        return given_up

    def abandon(self, error: Exception) -> None:
        """End all closures with `error`."""
        self.error = self.error or error
        for closure in list(self._open.values()):
            self._forget(closure)
            closure.error = error
        self._waiting.clear()
        self._running.clear()
        self._clocks.clear()

    def take_error(self) -> Exception | None:
        """Return the error to raise in the program now; closures scheduled after this call run again."""
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


def closure_header(
    payload: StepPayload,
    options: RunOptions,
    gradient_reduce_op: ReduceOp,
    summaries: SummaryOrder | None,
    number: int,
    *,
    looks_only: bool = False,
) -> bytes:
    """Return the pickle of a closure's `StepHeader`.

    Args:
        options: Run options; `on_nonfinite` is used.
        looks_only: The closure changes no variable.
    """
    header = StepHeader(
        step=number,
        generation=0,
        payload=payload.of_step(),
        rows=batch_rows(payload.per_replica),
        gradient_reduce_op=gradient_reduce_op,
        padding=False,
        on_nonfinite=options.on_nonfinite,
        seed=(torch.initial_seed(), num_seed_calls()),
        summaries=summaries,
        looks_only=looks_only,
        modes=TorchModes.here(),
    )
    return pickle.dumps(header, pickle.HIGHEST_PROTOCOL)
