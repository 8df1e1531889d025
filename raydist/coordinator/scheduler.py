"""The scheduler of a coordinator, and calls of single workers beside the closures.

The coordinator's thread runs the scheduler. The program's threads make the calls, and wait for that thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, final

from raydist.actors.worker_actors import WorkerCall
from raydist.coordinator.closures import Closure, ClosureQueue
from raydist.coordinator.interfaces import WorkerConnections
from raydist.coordinator.worker_pool import PayloadLog, WorkerPool, WorkerRecord
from raydist.core.errors import DeadlineExceededError, FailedPreconditionError, UnavailableError
from raydist.core.exception_utils import what_was_raised
from raydist.options import Timeouts
from raydist.replicas.ps.work_message import PlannedWork, WorkResult, address_work
from raydist.replicas.results import StepResult

_MESSAGE_S = 0.03  # of work in a message: a message costs driver and worker about 1 ms of CPU time
_MOST = 16


@final
class ClosurePace:
    """Estimates how long closures take, by their function."""

    def __init__(self) -> None:
        self._seconds: dict[bytes, float] = {}

    def learn(self, key: bytes, seconds: float) -> None:
        """Record the duration of a closure of this function."""
        before = self._seconds.pop(key, seconds)
        self._seconds[key] = 0.8 * before + 0.2 * seconds
        if len(self._seconds) > 256:
            del self._seconds[next(iter(self._seconds))]

    def most(self, key: bytes) -> int:
        """Return how many closures of this function a message may have.

        >>> pace = ClosurePace()
        >>> pace.learn(b"f", 0.001)
        >>> pace.most(b"f"), pace.most(b"never seen")
        (16, 1)
        """
        seconds = self._seconds.get(key)
        return 1 if seconds is None else max(1, min(_MOST, int(_MESSAGE_S / max(seconds, 1e-9))))


_AHEAD = 2  # messages that a worker may have: one that it works on, and the next one
_MESSAGE_BYTES = 24 << 10  # Ray sends up to 100 KB with a call; the rest of a message needs room, too


@final
class Scheduler:
    """Sends closures to workers, and handles their answers. One thread at a time may call this object.

    Nothing here blocks, except on the servers when a worker has died.
    """

    def __init__(self, pool: WorkerPool, workers: WorkerConnections, queue: ClosureQueue, log: PayloadLog) -> None:
        self.pool = pool  # the workers
        self.seen: tuple[int, ...] = ()  # by server, the highest version that a worker has reported
        self.remarks: list[str] = []  # warnings for the program
        self.num_ended = 0  # number of answered messages
        self.last_to_answer: int | None = None  # the worker that answered last; None before the first
        # Called with the only result of each closure that succeeds. Must not raise or block.
        self.on_result: list[Callable[[Sequence[StepResult]], None]] = []
        self._workers = workers
        self._queue = queue
        self._log = log
        self._pace = ClosurePace()
        self._next = 0

    def call(self, number: int, method: str, *args: Any) -> WorkerCall:
        """Call a method of a worker's runner, after all messages sent before."""
        asked = self._workers.call(number, method, *args)
        self.pool.expect(self.pool.members[number], asked, lambda asked: None)
        return asked

    def advance(self) -> bool:
        """Handle answers and send closures; return True if an answer has come."""
        come = self.pool.take_in()
        self.send()
        return come

    def due(self, number: int) -> list[bytes]:
        """Return the log entries that a worker must receive before it is called."""
        return self._log.due(number, self._log.end)

    def titles_of_busy(self) -> list[str]:
        """Return the names of busy workers and their closures, for messages."""
        found = []
        for worker in self.pool.members:
            running = self._queue.running_on(worker.number)
            if running:
                found.append(f"{self.pool.title_of(worker)} (closure {running[0].number})")
        return found

    def send(self) -> None:
        """Send waiting closures to free workers."""
        while self._queue.num_waiting and self._queue.error is None and self._queue.lost_server is None:
            free = self._freest()
            if free is None or not self._queue.may_begin:
                return
            self._send_to(free)

    def _freest(self) -> WorkerRecord | None:
        """Return the ready worker with the fewest closures; equal ones take turns."""
        order = self.pool.members[self._next :] + self.pool.members[: self._next]
        living = self.pool.ready()
        free = [worker for worker in order if worker.is_ready and worker.under_way < _AHEAD]
        free = [worker for worker in free if self._queue.capacity_of(worker.number, living) != 0]
        return min(free, key=lambda worker: len(self._queue.running_on(worker.number)), default=None)

    def _send_to(self, worker: WorkerRecord) -> None:
        self._next = (worker.number + 1) % len(self.pool.members)
        closures, works = self._take_for(worker)
        try:
            if closures[0].alone:  # as `join` does: apply incomplete synchronous steps first
                self.pool.finish()
            message, refs = address_work(
                works, worker.objects, finished_below=self._queue.finished_below, used=worker.drawn
            )
            asked = self._workers.send(worker.number, message, refs)
        except Exception as error:
            self._fail(worker, closures, error)
            return
        except BaseException:  # KeyboardInterrupt: it may have been sent or not; servers apply its changes once
            self._queue.put_back(worker.number, closures)
            raise
        worker.under_way += 1
        self.pool.expect(worker, asked, lambda asked: self._answered(worker, closures, asked))

    def _take_for(self, worker: WorkerRecord) -> tuple[list[Closure], list[tuple[PlannedWork, Sequence[bytes]]]]:
        closures: list[Closure] = []
        works: list[tuple[PlannedWork, Sequence[bytes]]] = []
        living = self.pool.ready()
        share = -(-self._queue.num_waiting // (2 * max(1, len(living))))  # so that workers end together
        capacity = self._queue.capacity_of(worker.number, living)
        if capacity is not None:
            share = min(share, capacity)
        num_bytes = 0
        while (closure := self._queue.peek()) is not None and closure.work is not None:
            num_bytes += closure.work.num_bytes
            most = min(share, self._pace.most(closure.key))
            if closures and (len(closures) >= most or num_bytes > _MESSAGE_BYTES or closure.alone):
                break
            closures.append(self._queue.take(worker.number))
            works.append((closure.work, self._log.due(worker.number, closure.work.after)))
            if closure.alone:
                break
        return closures, works

    def _answered(self, worker: WorkerRecord, closures: Sequence[Closure], asked: WorkerCall) -> None:
        worker.under_way -= 1
        self.num_ended += 1
        if asked.error is not None:  # of the whole message: nobody knows what has arrived
            self._fail(worker, closures, asked.error)
            return
        answer: WorkResult = asked.value
        worker.starts = 0
        worker.drawn.update(answer.drawn)
        self.last_to_answer = worker.number
        self._learn(closures, answer)
        for place, (closure, ended) in enumerate(zip(closures, answer.results, strict=True)):
            if ended.result is not None:
                self._queue.succeed(worker.number, closure, ended.result.without_summaries())
                for callback in () if closure.alone else self.on_result:
                    callback((ended.result,))
            elif ended.error is not None:
                error = ended.error.restore()
                if self.pool.is_server_loss(error):
                    self._queue.interrupt(error, worker.number, closures[place:])
                    return
                self._queue.fail(worker.number, closure, error)
            else:
                self._queue.skip(worker.number, closure)

    def _fail(self, worker: WorkerRecord, closures: Sequence[Closure], error: Exception) -> None:
        worker.objects.forget()
        if self.pool.is_server_loss(error):
            self._queue.interrupt(error, worker.number, closures)
            return
        for closure in closures:
            self._queue.fail(worker.number, closure, error)

    def _learn(self, closures: Sequence[Closure], answer: WorkResult) -> None:
        for closure in closures:
            self._pace.learn(closure.key, answer.seconds / len(closures))
        self.note_seen(answer.versions)
        self.remarks += answer.remarks

    def note_seen(self, versions: Sequence[int]) -> None:
        """Raise the versions that closures sent from now on must see."""
        missing = len(versions) - len(self.seen)
        before = (*self.seen, *(0,) * missing)
        self.seen = tuple(map(max, before, (*versions, *(0,) * (len(before) - len(versions)))))


_SLICE_S = 0.5  # between two looks at the clock


@final
class ClosureCondition:
    """The condition on which the program's threads wait for the coordinator's thread."""

    def __init__(self, scheduler: Scheduler, queue: ClosureQueue, timeouts: Timeouts) -> None:
        # the lock around all state that the threads share; notified of each change
        self.changed = threading.Condition(threading.RLock())
        self.is_closed = False  # the strategy was closed: no thread may wait any more
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
            if self._queue.lost_server is not None:  # all workers start again
                raise UnavailableError(f"{self._workers.names[worker]} is gone.", actor=self._workers.names[worker])
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
        while True:
            with self._condition.changed:
                self._await_ready()
                workers, began = self._pool.ready(), self._queue.num_resumed
            try:
                return [self.ask_after_log(worker, method, *args) for worker in workers]
            except UnavailableError as error:
                if not self.await_servers(error, began):
                    raise

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
                worker, began = self._choose_reader(), self._queue.num_resumed
            try:
                return worker, do(worker)
            except UnavailableError as error:
                if not self.is_dead(error, worker) and not self.await_servers(error, began):
                    raise

    def await_servers(self, error: UnavailableError, began: int) -> bool:
        """Return False if `error` is not of a lost server. Otherwise wait until all servers are there again.

        Raises the error of a recovery that failed.

        Args:
            began: `ClosureQueue.num_resumed` before the operation that raised `error`.
        """
        with self._condition.changed:
            was_restarted = self._queue.lost_server is not None or self._queue.num_resumed != began
            if not self._pool.is_server_loss(error) and not was_restarted:
                return False
            if not was_restarted:
                self._queue.interrupt(error)
                self._condition.changed.notify_all()
                self._workers.announce()
            self._condition.wait_until(
                lambda: self._queue.lost_server is None or self._condition.is_closed, "servers that start again"
            )
            self._condition.require_open()
            if (failure := self._queue.take_error()) is not None:
                raise what_was_raised(failure)
            return True

    def _choose_reader(self) -> int:
        """Prefer the last reader, then the worker that last ran closures: it has what a step leaves behind."""
        ready = self._pool.ready()
        wanted = (None if self._reader is None else self._reader[0], self._scheduler.last_to_answer)
        return next((worker for worker in wanted if worker is not None and worker in ready), ready[0])

    def _await_ready(self) -> None:
        self._condition.wait_until(
            lambda: (bool(self._pool.ready()) and self._queue.lost_server is None) or self._pool.all_gone,
            "a worker that has started",
        )
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
        return gone or (asked.done and not self.is_dead(asked.error, worker)) or self._condition.is_closed

    def is_dead(self, error: Exception | None, worker: int) -> bool:
        """Return True for the error of a worker that has died."""
        return isinstance(error, UnavailableError) and error.actor == self._workers.names[worker]
