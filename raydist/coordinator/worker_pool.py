"""The workers of a coordinator: their states, the log of changes that each has received, and restarts of dead ones.

Nothing here blocks, except on the servers when a worker has died. No closure is sent before all workers are known to
run the same versions, unless a worker takes more than 10 s to report its versions.
"""

from __future__ import annotations

import enum
import logging
import math
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from raydist.actors.version_check import installed_software, require_devices, require_same_software
from raydist.actors.worker_actors import WorkerCall
from raydist.coordinator.closures import ClosureQueue
from raydist.coordinator.interfaces import ServerSide, WorkerConnections
from raydist.core.errors import DeadlineExceededError, FailedPreconditionError, UnavailableError
from raydist.options import Timeouts
from raydist.replicas.ps.worker_runner import WorkerRunner
from raydist.replicas.step_message import SentObjects

_MOST_STARTS = 5  # starts of a worker's process with no closure done in between
_TOGETHER_S = 10.0  # time that started workers wait for the versions of others

_log = logging.getLogger("raydist")


@final
class WorkerPool:
    """The table of workers and their states."""

    def __init__(
        self,
        workers: WorkerConnections,
        servers: ServerSide,
        num_workers: int,
        queue: ClosureQueue,
        log: PayloadLog,
        timeouts: Timeouts,
    ) -> None:
        self.members = [WorkerRecord(number) for number in range(num_workers)]  # the workers, by number
        # Called at each death with the worker, its generation, and the number of batches that its ended closures used
        # in this generation, by iterator name. Must not raise or block.
        self.on_lost: list[Callable[[int, int, Mapping[str, int]], None]] = []
        # Returns True for the error of a dead server that is to be replaced.
        self.is_server_loss: Callable[[Exception], bool] = lambda error: False
        self._workers = workers
        self._servers = servers
        self._queue = queue
        self._log = log
        self._timeouts = timeouts
        self._asked: list[tuple[WorkerCall, Callable[[Any], None]]] = []
        self._cause: Exception | None = None
        self._started_at: float | None = None  # when the first worker had started

    @property
    def is_busy(self) -> bool:
        """True while an answer is pending."""
        return bool(self._asked)

    def start(self) -> None:
        """Start every worker without waiting for it."""
        for worker in self.members:
            self._begin(worker)

    def stop_all(self) -> None:
        """Kill all workers, requeue their closures, and launch other processes, which `begin_all` makes workers.

        Nothing counts as the death of a worker.
        """
        for worker in self._living():
            self._tell_lost(worker)
            self._queue.requeue(worker.number)
            worker.generation += 1
            worker.state, worker.starts, worker.deadline = WorkerState.STARTING, 0, math.inf
            self._workers.replace(worker.number)

    def begin_all(self) -> None:
        """Start the workers in the processes that `stop_all` has launched, without waiting for them."""
        for worker in self._living():
            self._begin(worker)

    def _living(self) -> list[WorkerRecord]:
        return [worker for worker in self.members if worker.state is not WorkerState.GONE]

    def finish(self) -> None:
        """Make the servers apply incomplete synchronous steps."""
        self._servers.finish()

    def ready(self) -> list[int]:
        """Return the numbers of the workers that can be sent closures."""
        return [member.number for member in self.members if member.is_ready]

    @property
    def all_gone(self) -> bool:
        """True if no worker will ever be ready."""
        return all(worker.state is WorkerState.GONE for worker in self.members)

    @property
    def error_of_all(self) -> Exception:
        """The error of a coordinator without workers."""
        return self._cause or _nobody_left(UnavailableError("It was stopped."))

    def generation_of(self, number: int) -> int:
        """Return the number of earlier starts of a worker."""
        return self.members[number].generation

    def title_of(self, member: WorkerRecord) -> str:
        """Return a worker's name, for messages."""
        return self._workers.names[member.number]

    def take_in(self) -> bool:
        """Handle answers that have come and deadlines that have passed; return True if anything has changed."""
        before = self.ready()
        come = [pair for pair in self._asked if pair[0].done]
        if come:
            self._asked = [pair for pair in self._asked if not pair[0].done]
            for asked, deal_with in come:
                deal_with(asked)
        self._look_at_clocks()
        return bool(come) or self.ready() != before

    def expect(self, worker: WorkerRecord, asked: WorkerCall, deal_with: Callable[[Any], None]) -> None:
        """Call `deal_with` with an answer once it has come, unless the worker's process has died before."""
        generation = worker.generation

        def come(asked: WorkerCall) -> None:
            if worker.generation != generation or worker.state is WorkerState.GONE:
                return  # an answer of a process whose death was handled already
            if isinstance(asked.error, UnavailableError) and asked.error.actor == self.title_of(worker):
                self._lost(worker, asked.error)
            else:
                deal_with(asked)

        self._asked.append((asked, come))

    def _begin(self, worker: WorkerRecord) -> None:
        worker.state = WorkerState.STARTING
        worker.starts += 1
        worker.deadline = time.monotonic() + self._timeouts.start_s
        worker.under_way, worker.objects = 0, SentObjects()
        self._log.restarted(worker.number)
        worker.drawn_before = dict(worker.drawn)
        setup = self._servers.setup_of(worker.number, worker.generation)
        about, started = self._workers.begin(worker.number, WorkerRunner, setup, *self._history_of(worker))
        self.expect(worker, about, lambda asked: self._compare(worker, asked, setup.device))
        self.expect(worker, started, lambda asked: self._started(worker, asked))

    def _history_of(self, worker: WorkerRecord) -> tuple[int, int, dict[str, int]]:
        return len(self.members), worker.generation, dict(worker.drawn)

    def _compare(self, worker: WorkerRecord, asked: WorkerCall, device: str) -> None:
        name = self.title_of(worker)
        try:
            if asked.error is not None:
                raise asked.error
            require_same_software(installed_software(), [asked.value], [name])
            require_devices([device], [asked.value], [name])
        except FailedPreconditionError as error:
            self._refuse(worker, error)
        except Exception as error:
            self._give_up(worker, error)
        worker.compared = True
        self._let_begin()

    def _refuse(self, worker: WorkerRecord, error: FailedPreconditionError) -> None:
        """Remove a worker whose node does not fit the program; at the first start, remove all workers."""
        if not worker.compared:
            for member in self.members:
                member.state = WorkerState.GONE
        self._give_up(worker, error)

    def _started(self, worker: WorkerRecord, asked: WorkerCall) -> None:
        if asked.error is not None:
            self._give_up(worker, asked.error)
        else:
            worker.state = WorkerState.STARTED
            self._let_begin()

    def _let_begin(self) -> None:
        started = [member for member in self.members if member.state is WorkerState.STARTED]
        if started and (self._all_compared or self._has_waited()):
            for member in started:
                member.state = WorkerState.READY

    @property
    def _all_compared(self) -> bool:
        return all(member.compared or member.state is WorkerState.GONE for member in self.members)

    def _has_waited(self) -> bool:
        now = time.monotonic()
        self._started_at = now if self._started_at is None else self._started_at
        return now - self._started_at > _TOGETHER_S

    def _give_up(self, worker: WorkerRecord, error: Exception) -> None:
        """Remove a worker for good. Without any worker left, all closures end with an error."""
        worker.state = WorkerState.GONE
        if self.all_gone:
            self._cause = _nobody_left(error)
            self._queue.abandon(self._cause)
        else:
            _log.warning("The others go on without %s: %s", self.title_of(worker), error)
            self._queue.lost(worker.number, error)

    def _look_at_clocks(self) -> None:
        self._let_begin()
        for worker in self.members:
            if worker.state is WorkerState.STARTING and time.monotonic() > worker.deadline:
                limit = f"{self._timeouts.start_s:g} s (Timeouts.start_s)"
                name = self.title_of(worker)
                self._give_up(worker, DeadlineExceededError(f"{name} must start within {limit}, and did not."))

    def _lost(self, worker: WorkerRecord, error: UnavailableError) -> None:
        """Handle the death of a worker's process: fence it before other workers get its closures, then restart it."""
        try:
            self._servers.fence(worker.number, worker.generation)
        except Exception as failure:  # the servers have failed: no worker can go on
            if self.is_server_loss(failure):
                self._queue.interrupt(failure)
            else:
                self._queue.fail_all(failure)
        self._tell_lost(worker)
        self._queue.lost(worker.number, error)
        if worker.starts >= _MOST_STARTS:
            self._give_up(worker, self._too_often(worker, error))
            return
        worker.generation += 1
        try:
            self._workers.replace(worker.number)
            self._begin(worker)
        except Exception as failure:
            self._give_up(worker, failure)

    def _tell_lost(self, worker: WorkerRecord) -> None:
        for callback in self.on_lost:
            callback(worker.number, worker.generation, _since(worker.drawn, worker.drawn_before))

    def _too_often(self, worker: WorkerRecord, error: UnavailableError) -> UnavailableError:
        return UnavailableError(
            f"{self.title_of(worker)} must live long enough to do a closure, but died {worker.starts} times "
            f"before it had done one; the last time: {error}"
        )


def _since(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in now.items()}


def _nobody_left(cause: Exception) -> Exception:
    """Return the error to raise when all workers are gone; a version or device mismatch is raised as it is."""
    if isinstance(cause, FailedPreconditionError):
        return cause
    error = UnavailableError(
        f"No worker is left that could do anything; the last one: {cause} Close the strategy, and start again from "
        "your last checkpoint."
    )
    error.__cause__ = cause
    return error


@final
class WorkerState(enum.Enum):
    """State of a worker's process. A STARTED worker becomes READY once all workers' versions are known to agree."""

    STARTING = enum.auto()
    STARTED = enum.auto()
    READY = enum.auto()
    GONE = enum.auto()


@final
@dataclass
class WorkerRecord:
    """The state of one worker."""

    number: int
    generation: int = 0  # number of earlier starts
    state: WorkerState = WorkerState.STARTING  # state of the process; only a READY worker gets closures
    compared: bool = False  # True once the worker has reported its versions, now or in an earlier generation
    deadline: float = 0.0  # time (monotonic) by which the worker must have started
    starts: int = 0  # number of starts since the worker last completed a message
    under_way: int = 0  # number of messages that the worker has not answered
    objects: SentObjects = field(default_factory=SentObjects)  # objects of the object store that the worker has
    drawn: dict[str, int] = field(default_factory=dict)  # see `WorkResult`
    drawn_before: dict[str, int] = field(default_factory=dict)  # `drawn` at the worker's last start

    @property
    def is_ready(self) -> bool:
        """True if the worker can be sent closures."""
        return self.state is WorkerState.READY


@final
class PayloadLog:
    """Entries that every worker must receive before closures scheduled after them.

    A restarted worker receives all entries. An entry whose effect a later entry replaces (a learning rate, set every
    step) is dropped once all living workers have received it: so the log stays short.
    """

    def __init__(self, num_workers: int) -> None:
        self._entries: dict[int, bytes] = {}
        self._repeats: dict[int, frozenset[Hashable]] = {}
        self._end = 0
        self._had = [0] * num_workers

    @property
    def end(self) -> int:
        """Number of entries appended so far."""
        return self._end

    @property
    def num_held(self) -> int:
        """Number of entries that a new worker receives."""
        return len(self._entries)

    def append(self, entry: bytes, what: frozenset[Hashable] = frozenset()) -> None:
        """Append an entry.

        Args:
            what: All settings that the entry changes, if a later entry with the same settings replaces it entirely.
        """
        self._entries[self._end] = entry
        if what:
            self._repeats[self._end] = what
        self._end += 1
        self._compact()

    def due(self, worker: int, before: int) -> list[bytes]:
        """Return the entries before position `before` that a worker has not received, and mark them as received."""
        if not self._had[worker]:
            before = self._end  # an entry that a later one replaces may be gone: the worker gets the later one, too
        begin, self._had[worker] = self._had[worker], max(before, self._had[worker])
        if begin >= before:
            return []
        return [entry for place, entry in self._entries.items() if begin <= place < before]

    def restarted(self, worker: int) -> None:
        """Mark a worker as having received nothing."""
        self._had[worker] = 0

    def _compact(self) -> None:
        # Restarted workers (0) are left out: `due` sends them what is left, in order.
        common = min((had for had in self._had if had), default=0)
        newer: set[Hashable] = set()
        for place in sorted(self._repeats, reverse=True):
            what = self._repeats[place]
            if place < common and what <= newer:
                del self._entries[place], self._repeats[place]
            newer |= what
