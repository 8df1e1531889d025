"""Calls of single workers beside the closures, and waits of the program's threads for the coordinator's thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, final

from raydist.coordinator.closures import ClosureQueue
from raydist.coordinator.interfaces import WorkerCall, WorkerConnections
from raydist.coordinator.scheduler import Scheduler
from raydist.coordinator.worker_pool import WorkerPool
from raydist.core.errors import DeadlineExceededError, FailedPreconditionError, UnavailableError
from raydist.core.exception_utils import what_was_raised
from raydist.options import Timeouts

_SLICE_S = 0.5  # between two looks at the clock


@final
class ClosureCondition:
    """The condition on which the program's threads wait for the coordinator's thread.

    Attributes:
        changed: The lock around all state that the threads share; notified of each change.
        is_closed: The strategy was closed: no thread may wait any more.
    """

    def __init__(self, scheduler: Scheduler, queue: ClosureQueue, timeouts: Timeouts) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.is_closed = False
        self._scheduler = scheduler
        self._queue = queue
        self._timeouts = timeouts

    def wait_until(self, holds: Callable[[], bool], what: str, timeout_s: float | None = None) -> None:
        """Block until `holds()` is true; the caller holds the lock.

        Args:
            what: Describes in the error what the caller waits for.
            timeout_s: Time limit; None: until no closure has ended for `Timeouts.step_s`.
        """
        limit_s, named = (self._timeouts.step_s, "Timeouts.step_s") if timeout_s is None else (timeout_s, "timeout")
        end, progress = time.monotonic() + limit_s, self._scheduler.num_ended
        while not holds():
            left = end - time.monotonic()
            if timeout_s is None and progress != self._scheduler.num_ended:
                end, progress = time.monotonic() + limit_s, self._scheduler.num_ended
            elif left <= 0:
                raise self._too_late(what, limit_s, named)
            self.changed.wait(min(max(left, 0.0), _SLICE_S))

    def _too_late(self, what: str, limit_s: float, named: str) -> DeadlineExceededError:
        busy = ", ".join(self._scheduler.titles_of_busy()) or "no worker has anything to do"
        return DeadlineExceededError(
            f"Waiting for {what} must end within {limit_s:g} s ({named}), but {self._queue.num_open} closures have not "
            f"ended. At work: {busy}. A function may be stuck, or take longer: give join a longer timeout, or raise "
            "Timeouts.step_s. Nothing was cancelled."
        )

    def require_open(self) -> None:
        """Raise if the strategy was closed."""
        if self.is_closed:
            raise FailedPreconditionError(
                "The strategy must be open to schedule closures, it was closed. Create a new strategy."
            )


_T = TypeVar("_T")


@final
class WorkerCalls:
    """Calls of workers' runners, for the program's threads."""

    def __init__(
        self,
        workers: WorkerConnections,
        pool: WorkerPool,
        scheduler: Scheduler,
        queue: ClosureQueue,
        condition: ClosureCondition,
    ) -> None:
        self._workers = workers
        self._pool = pool
        self._scheduler = scheduler
        self._queue = queue
        self._condition = condition
        self._reader: tuple[int, int] | None = None

    def ask(self, worker: int, method: str, *args: Any) -> Any:
        """Call a method of one worker's runner after all messages sent before; return its result or raise its error."""
        with self._condition.changed:
            asked = self._scheduler.call(worker, method, *args)
            self._condition.changed.notify_all()
            generation = self._pool.generation_of(worker)
            doing = f"{method} on {self._workers.names[worker]}"
            self._condition.wait_until(lambda: self._is_over(asked, worker, generation), doing)
        if asked.error is not None:
            raise what_was_raised(asked.error)
        if not asked.done:
            raise UnavailableError(f"{self._workers.names[worker]} is gone.", actor=self._workers.names[worker])
        return asked.value

    def ask_after_log(self, worker: int, method: str, *args: Any) -> Any:
        """Send the worker the rest of the log, then `ask`."""
        entries = self._scheduler.due(worker)
        if entries:
            self.ask(worker, "follow", entries)
        return self.ask(worker, method, *args)

    def read(self, method: str, *args: Any) -> Any:
        """Call `ask_after_log` on any one worker."""
        return self.with_reader(lambda worker: self._read_from(worker, method, *args))[1]

    def read_all(self, method: str, *args: Any) -> list[Any]:
        """Call `ask_after_log` on every living worker."""
        with self._condition.changed:
            self._await_ready()
            workers = self._pool.ready()
        return [self.ask_after_log(worker, method, *args) for worker in workers]

    def _read_from(self, worker: int, method: str, *args: Any) -> Any:
        reader = worker, self._pool.generation_of(worker)
        if self._reader not in (None, reader):  # the driver's knowledge comes from another worker
            self.ask(worker, "tell_everything")
        self._reader = reader
        return self.ask_after_log(worker, method, *args)

    def with_reader(self, do: Callable[[int], _T]) -> tuple[int, _T]:
        """Call `do` with one worker; if this worker dies meanwhile, repeat with another."""
        while True:
            with self._condition.changed:
                self._await_ready()
                worker = self._choose_reader()
            try:
                return worker, do(worker)
            except UnavailableError as error:
                if not self._is_dead(error, worker):
                    raise

    def _choose_reader(self) -> int:
        """Prefer the last reader, then the worker that last ran closures: it has what a step leaves behind."""
        ready = self._pool.ready()
        wanted = (None if self._reader is None else self._reader[0], self._scheduler.last_to_answer)
        return next((worker for worker in wanted if worker is not None and worker in ready), ready[0])

    def _await_ready(self) -> None:
        self._condition.wait_until(lambda: bool(self._pool.ready()) or self._pool.all_gone, "a worker that has started")
        self._condition.require_open()
        self.require_workers()

    def require_workers(self) -> None:
        """Raise the cause if all workers are gone. The caller holds the lock."""
        if self._pool.all_gone:
            self._queue.take_error()
            raise self._pool.error_of_all

    def _is_over(self, asked: WorkerCall, worker: int, generation: int) -> bool:
        # Not before the death of a worker was handled: the next call would go to the same one.
        gone = self._pool.generation_of(worker) != generation or worker not in self._pool.ready()
        return gone or (asked.done and not self._is_dead(asked.error, worker)) or self._condition.is_closed

    def _is_dead(self, error: Exception | None, worker: int) -> bool:
        return isinstance(error, UnavailableError) and error.actor == self._workers.names[worker]
