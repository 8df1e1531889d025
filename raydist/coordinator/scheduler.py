"""The scheduler of a coordinator: sends closures to workers, and handles their answers.

Nothing here blocks, except on the servers when a worker has died. The owner lets only one thread at a time call this
object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from raydist.coordinator.closures import Closure, ClosureQueue
from raydist.coordinator.interfaces import WorkerCall, WorkerConnections
from raydist.coordinator.worker_pool import PayloadLog, WorkerPool, WorkerRecord
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
    """The scheduler of closures on workers.

    Attributes:
        pool: The workers.
        seen: By server, the highest version that a worker has reported.
        remarks: Warnings for the program.
        num_ended: Number of answered messages.
        last_to_answer: The worker that answered last; None before the first.
        on_result: Called with the only result of each closure that succeeds. Must not raise or block.
    """

    def __init__(self, pool: WorkerPool, workers: WorkerConnections, queue: ClosureQueue, log: PayloadLog) -> None:
        self.pool = pool
        self.seen: tuple[int, ...] = ()
        self.remarks: list[str] = []
        self.num_ended = 0
        self.last_to_answer: int | None = None
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
        while self._queue.num_waiting and self._queue.error is None:
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
        for closure, ended in zip(closures, answer.results, strict=True):
            if ended.result is not None:
                self._queue.succeed(worker.number, closure, ended.result.without_summaries())
                for told in () if closure.alone else self.on_result:
                    told((ended.result,))
            elif ended.error is not None:
                self._queue.fail(worker.number, closure, ended.error.restore())
            else:
                self._queue.cancel(worker.number, closure)

    def _fail(self, worker: WorkerRecord, closures: Sequence[Closure], error: Exception) -> None:
        worker.objects.forget()
        for closure in closures:
            self._queue.fail(worker.number, closure, error)

    def _learn(self, closures: Sequence[Closure], answer: WorkResult) -> None:
        for closure in closures:
            self._pace.learn(closure.key, answer.seconds / len(closures))
        self.note_seen(answer.told)
        self.remarks += answer.remarks

    def note_seen(self, told: Sequence[int]) -> None:
        """Raise the versions that closures sent from now on must see."""
        missing = len(told) - len(self.seen)
        before = (*self.seen, *(0,) * missing)
        self.seen = tuple(map(max, before, (*told, *(0,) * (len(before) - len(told)))))
