"""Schedule closures on workers and wait for them: the driver's side of a `ParameterServerStrategy`.

One thread waits for the answers of workers and sends them the next closures; the program's threads wait only for what
they ask for. The coordinator knows nothing of datasets, and of variables only that they live on servers.
"""

from __future__ import annotations

import functools
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, TypeVarTuple, cast, final

from raydist.cluster.preemption import is_preempted
from raydist.coordinator.closures import Closure, ClosureQueue
from raydist.coordinator.interfaces import RecoversServers, ServerSide, WorkerConnections
from raydist.coordinator.scheduler import ClosureCondition, Scheduler, WorkerCalls
from raydist.coordinator.worker_pool import PayloadLog, WorkerPool
from raydist.core.errors import CancelledError, DeadlineExceededError, FailedPreconditionError, UnavailableError
from raydist.core.exception_utils import what_was_raised
from raydist.core.fork_guard import OwningProcess
from raydist.core.nest import unflatten
from raydist.mirroring.messages import MirrorCalls, StepPayload
from raydist.options import Timeouts
from raydist.replicas.ps.work_message import ClosureLabel, LogEntry, PlannedWork
from raydist.replicas.results import StepResult
from raydist.replicas.runner import ReplicaRunner

_T = TypeVar("_T")

_MOST_WAITING = 256 * 1024  # closures, as TensorFlow's
_MOST_WITH_BATCHES = 32  # closures that hold batches, which stay in the object store until the closures end
_MOST_BYTES = 256 << 20  # of arguments of closures that wait
_SLICE_S = 0.5  # between two looks at the clock


@final
class Coordinator:
    """The scheduler of closures. The constructor starts nothing.

    Args:
        max_clocks: Of `rd.BoundedStaleness`; None: workers do not wait for each other. See `ClosureQueue`.
    """

    def __init__(
        self,
        workers: WorkerConnections,
        servers: ServerSide,
        num_workers: int,
        timeouts: Timeouts,
        max_clocks: int | None = None,
    ) -> None:
        self._workers = workers
        self._servers = servers
        self._timeouts = timeouts
        self._queue = ClosureQueue(max_clocks)
        self._log = PayloadLog(num_workers)
        self._pool = WorkerPool(workers, servers, num_workers, self._queue, self._log, timeouts)
        self._scheduler = Scheduler(self._pool, workers, self._queue, self._log)
        self._condition = ClosureCondition(self._scheduler, self._queue, timeouts)
        self._changed = self._condition.changed
        self._calls = WorkerCalls(workers, self._pool, self._scheduler, self._queue, self._condition)
        self._dropped: list[int] = []  # handles that servers may still have
        self._thread: threading.Thread | None = None
        self._recovery: RecoversServers | None = None
        self._process = OwningProcess("A strategy with its variables and results")

    # Methods for the program's threads.

    def start(self) -> None:
        """Start the workers without waiting for them."""
        with self._changed:
            self._pool.start()
            self._thread = threading.Thread(target=self._serve, name="raydist-coordinator", daemon=True)
            self._thread.start()

    def recover_servers(self, recovery: RecoversServers) -> None:
        """Let `recovery` replace servers that die, in the coordinator's thread, while no closure is sent."""
        with self._changed:
            self._recovery = recovery
            self._pool.is_server_loss = recovery.is_loss

    def when_lost(self, callback: Callable[[int, int, Mapping[str, int]], None]) -> None:
        """Call `callback` at each death of a worker; see `WorkerPool.on_lost`."""
        with self._changed:
            self._pool.on_lost.append(callback)

    def when_done(self, callback: Callable[[Sequence[StepResult]], None]) -> None:
        """Call `callback` for each closure that succeeds; see `Scheduler.on_result`."""
        with self._changed:
            self._scheduler.on_result.append(callback)

    def schedule(
        self,
        payload: StepPayload,
        make_header: Callable[[int], bytes],
        key: bytes = b"",
        *,
        alone: bool = False,
        boundary: int = 0,
    ) -> Closure:
        """Run a closure on the next free worker. Blocks while too many closures wait.

        Args:
            make_header: Returns the pickle of the closure's `StepHeader`, given the closure's number.
            key: Identifies the function.
            alone: See `Closure.alone`.
            boundary: See `Closure.boundary`.
        """
        self._process.require("used")
        self.raise_error()
        self._enter(payload)
        with self._changed:
            self._condition.wait_until(lambda: self._has_room(payload), "room in the queue of closures")
            self._condition.require_open()
            self._calls.require_workers()
            number = self._queue.next_number()
            work = PlannedWork(
                number, make_header(number), payload.per_replica, self._scheduler.seen, self._log.end, self._queue.epoch
            )
            closure = Closure(number, work, key, alone=alone, boundary=boundary)
            self._queue.add(closure)
            self._scheduler.send()
            self._changed.notify_all()
        return closure

    def _has_room(self, payload: StepPayload) -> bool:
        waiting = self._queue.num_waiting
        most = _MOST_WITH_BATCHES if payload.per_replica else _MOST_WAITING
        return waiting < most and waiting * len(payload.arguments) < _MOST_BYTES

    def _enter(self, payload: StepPayload) -> None:
        """Append the part of a payload that all workers need to the log."""
        kept = payload.without_step()
        if kept is None:
            return
        if payload.has_values:
            self._settle(LogEntry(kept))
        else:
            self.record(LogEntry(kept), payload.settings)
        with self._changed:
            self._dropped += kept.released

    def record(self, entry: LogEntry, what: frozenset[Any] = frozenset()) -> None:
        """Append an entry to the log: closures scheduled from now on run after it."""
        with self._changed:
            self._log.append(entry.packed(), what)

    def _settle(self, entry: LogEntry) -> None:
        """Apply an entry on one worker first, alone; this worker gives new variables to the servers."""
        self.join()

        def settle(worker: int) -> Any:
            settled = self._calls.ask(worker, "settle", self._scheduler.due(worker), entry.packed())
            plan = self._servers.plan(settled)
            versions = self._calls.ask(worker, "place", plan, ClosureLabel(self._queue.next_number()))
            self._servers.accept(plan)
            return plan, versions

        worker, (plan, versions) = self._calls.with_reader(settle)
        with self._changed:
            self._scheduler.note_seen(versions)
            self._log.append(LogEntry(entry.payload, plan).packed())
            self._scheduler.due(worker)  # that worker already has this entry

    def note_seen(self, versions: Sequence[int]) -> None:
        """Make closures scheduled from now on see these versions of the servers' values, or newer ones."""
        with self._changed:
            self._scheduler.note_seen(versions)

    def read(self, method: str, *args: Any) -> Any:
        """Join, then return what a method of one worker's runner returns."""
        self.join()
        return self._calls.read(method, *args)

    def read_all(self, method: str, *args: Any) -> list[Any]:
        """Join, then return what a method of every living worker's runner returns."""
        self.join()
        return self._calls.read_all(method, *args)

    def cancel_pending(self, boundary: int) -> list[int]:
        """Cancel closures scheduled at this boundary or later, because the process is to end. See `StepQueue`."""
        error = CancelledError(
            "This function had not begun when the process was to end. Schedule it again after the restart."
        )
        with self._changed:
            cancelled = self._queue.give_up_from(boundary, error)
            self._changed.notify_all()
        return [closure.boundary for closure in cancelled]

    def wait_or_leave(self, timeout_s: float | None = None) -> None:
        """Return once all closures have ended, or the process is to end."""
        with self._changed:
            done = "the closures that were scheduled"
            self._condition.wait_until(lambda: not self._queue.num_open or is_preempted(), done, timeout_s)

    def join(self, timeout_s: float | None = None) -> None:
        """Block until all closures have ended; apply incomplete synchronous steps. Raises the first closure error."""
        self._process.require("used")
        if threading.current_thread() is self._thread:
            raise FailedPreconditionError("raydist bug: the coordinator's thread must not wait for closures.")
        with self._changed:
            self._condition.wait_until(lambda: not self._queue.num_open, "the closures that were scheduled", timeout_s)
            self._warn()
            self._raise_error()
            started = bool(self._pool.ready())
            dropped, self._dropped = self._dropped, []
        if started:
            self.ask_servers(self._servers.finish)
        if dropped:  # closures that begin later come after the drop in the log: no worker asks for these objects
            self.ask_servers(functools.partial(self._servers.drop, dropped))

    def ask_servers(self, do: Callable[[], _T]) -> _T:
        """Return `do()`, which asks the servers. If a server is lost meanwhile, repeat it once all are there again."""
        while True:
            began = self._queue.num_resumed
            try:
                return do()
            except UnavailableError as error:
                if not self._calls.await_servers(error, began):
                    raise

    def done(self) -> bool:
        """Return True if all closures have ended; raise their first error."""
        self._process.require("used")
        with self._changed:
            self._raise_error()
            return not self._queue.num_open

    def raise_error(self) -> None:
        """Raise the first error that the program has not been told of, once no worker runs a closure any more."""
        with self._changed:
            self._condition.require_open()
            self._warn()
            if self._queue.error is not None:
                self._condition.wait_until(
                    lambda: not self._queue.num_open, "the closures that were begun before one failed"
                )
                self._raise_error()

    def _raise_error(self) -> None:
        error = self._queue.take_error()
        if error is not None:
            raise what_was_raised(error)

    def _warn(self) -> None:
        remarks, self._scheduler.remarks = self._scheduler.remarks, []
        for remark in dict.fromkeys(remarks):
            warnings.warn(remark, stacklevel=4)

    def value_of(self, closure: Closure) -> Any:
        """Wait for a closure and return its value, or raise its error."""
        self._process.require("used")
        if not closure.ended:
            with self._changed:
                self._condition.wait_until(lambda: closure.ended, f"closure {closure.number}")
        if closure.error is not None:
            with self._changed:
                if self._queue.error is closure.error:  # raised here, and not again
                    self._queue.take_error()
            raise what_was_raised(closure.error)
        if closure.result is not None:
            closure.value, closure.result = _unpacked(closure.result), None
        return closure.value

    def close(self) -> None:
        """Cancel closures that have not ended, and end the thread. May be called twice."""
        with self._changed:
            if not self._condition.is_closed:
                self._condition.is_closed = True
                self._queue.abandon(
                    CancelledError("The strategy was closed before this closure was done. Call join() before close().")
                )
                self._changed.notify_all()
        self._workers.announce()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(self._timeouts.close_s)

    # Methods of the coordinator's own thread.

    def _serve(self) -> None:
        try:
            while self._serve_once():
                pass
        except BaseException as error:
            with self._changed:
                self._queue.abandon(FailedPreconditionError(f"raydist bug: the coordinator's thread ended: {error!r}"))
                self._condition.is_closed = True
                self._changed.notify_all()

    def _serve_once(self) -> bool:
        with self._changed:
            if self._scheduler.advance():
                self._changed.notify_all()
            if self._condition.is_closed:
                return False
            lost, recovery = self._queue.lost_server, self._recovery
            if not self._pool.is_busy and lost is None:
                self._changed.wait()
                return True
        if lost is not None and recovery is not None:
            self._recover(lost, recovery)
        else:
            self._workers.await_news(_SLICE_S)
        return True

    def _recover(self, lost: Exception, recovery: RecoversServers) -> None:
        failure: Exception | None = None
        versions: tuple[int, ...] = ()
        try:
            versions = recovery.recover(lost, self)
        except Exception as error:
            failure = error
        with self._changed:
            if failure is None:
                self._queue.resume()
                self._scheduler.seen = versions
            else:
                self._queue.give_up(failure)
            self._scheduler.num_ended += 1  # the program's threads wait anew for closures
            self._changed.notify_all()

    def stop_workers(self) -> None:
        """Call `WorkerPool.stop_all`. For a recovery of servers, as the methods below."""
        with self._changed:
            self._condition.require_open()
            self._pool.stop_all()

    def start_workers(self) -> None:
        """Call `WorkerPool.begin_all`."""
        with self._changed:
            self._pool.begin_all()

    def ask_any(self, method: str, *args: Any, within_s: float) -> Any:
        """Call a method of a worker's runner with the rest of the log; if it dies, of another one. Blocks."""
        end = time.monotonic() + within_s
        asked, generation = None, 0
        while time.monotonic() < end:
            with self._changed:
                self._pool.take_in()
                self._condition.require_open()
                self._calls.require_workers()
                if asked is None or self._pool.generation_of(asked.worker) != generation:
                    asked = None
                    for worker in self._pool.ready()[:1]:
                        generation = self._pool.generation_of(worker)
                        asked = self._scheduler.call(worker, method, self._scheduler.due(worker), *args)
                elif asked.done and asked.error is None:
                    return asked.value
                elif asked.done and asked.error is not None and not self._calls.is_dead(asked.error, asked.worker):
                    raise asked.error
            self._workers.await_news(_SLICE_S)
        raise DeadlineExceededError(f"A worker must start again and do {method} within {within_s:g} s, and none did.")


def _unpacked(result: StepResult) -> Any:
    return unflatten(result.structure, [result.leaf(index) for index in range(result.structure.num_leaves)])


_Args = TypeVarTuple("_Args")

_NO_CHANGES = pickle.dumps(({}, {}))  # of attributes, and of `requires_grad`


@final
class WorkersLink:
    """A `ReplicaLink`: any worker has all variables, after a pull.

    No single one of several workers can report the settings: settings belong to the driver, and stepping a scheduler
    between two runs does not block.

    Args:
        coordinator: Returns the coordinator. Called only by the methods below.
        note_steps_elsewhere: Called when an optimizer may have stepped and no worker is asked.
    """

    def __init__(
        self,
        num_workers: Callable[[], int],
        coordinator: Callable[[], Coordinator],
        note_steps_elsewhere: Callable[[], None],
    ) -> None:
        self._num_workers = num_workers
        self._coordinator = coordinator
        self._note_steps_elsewhere = note_steps_elsewhere

    def call(self, rank: int, method: Callable[[MirrorCalls, *_Args], _T], *args: *_Args) -> _T:
        """Implement `ReplicaLink.call`."""
        if method.__name__ == MirrorCalls.collect_control.__name__ and self._num_workers() > 1:
            self._note_steps_elsewhere()
            return cast("_T", _NO_CHANGES)
        found: _T = self._coordinator().read(ReplicaRunner.mirror.__name__, method, *args)
        return found

    def call_all(self, method: Callable[[MirrorCalls, *_Args], _T], *args: *_Args) -> list[_T]:
        """Implement `ReplicaLink.call_all`."""
        if method is MirrorCalls.collect_metrics:  # each worker has counted its own batches
            return self._coordinator().read_all(ReplicaRunner.mirror.__name__, method, *args)
        return [self.call(0, method, *args)]
