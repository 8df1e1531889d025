"""SyncWithBackups: the choice of the gradients that make up each step, on server 0 for all servers. Single-threaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, final

from raydist.core.errors import InvalidArgumentError
from raydist.parameter_servers.consistency import Consistency, SyncWithBackups
from raydist.parameter_servers.requests import (
    Arrive,
    BeginClosure,
    DropArrival,
    EndClosure,
    FenceWorker,
    Finish,
    Pull,
    PushKey,
    Sender,
    ServerAnswer,
    Verdict,
)
from raydist.parameter_servers.server_stats import ServerStats
from raydist.parameter_servers.serving.changes import Answered, AppliedUpdates, Changes, DelayedAnswers, Reply
from raydist.parameter_servers.serving.slices import PsSlices


@final
@dataclass(frozen=True, slots=True)
class Accepted:
    """The acceptance of a worker's gradient for a step.

    Attributes:
        step: Number of the step.
        completes: Number of gradients in the step.
    """

    step: int
    completes: int


@final
class Quorum:
    """Collects arrivals of gradients for one step after the other.

    A step is decided as soon as all workers that hold a closure but `num_backups` have arrived, at least one: by an
    arrival, or because an awaited worker ends its closure or dies.

    >>> quorum = Quorum(num_backups=1)
    >>> for worker in (0, 1, 2):
    ...     quorum.begin(worker)
    >>> [quorum.arrive(worker, step=0) for worker in (2, 0, 1)]
    ['waiting', 'accepted', 'late']
    >>> quorum.accepted(2)
    Accepted(step=0, completes=2)
    """

    def __init__(self, num_backups: int) -> None:
        self._num_backups = num_backups
        self._holding: set[int] = set()
        self._arrived: set[int] = set()
        self._accepted: dict[int, Accepted] = {}  # the last of each worker
        self.step = 0

    def begin(self, worker: int) -> None:
        """Count a worker, which holds a closure now."""
        self._holding.add(worker)

    def end(self, worker: int) -> None:
        """Stop waiting for a worker that holds no closure any more, or is dead. Its arrival stays."""
        self._holding.discard(worker)
        self._decide()

    def forget(self, worker: int) -> None:
        """Remove a dead worker, and its arrival for an undecided step."""
        self._arrived.discard(worker)
        self._accepted.pop(worker, None)
        self.end(worker)

    def arrive(self, worker: int, step: int) -> Literal["waiting", "accepted", "late"]:
        """Record a worker's gradient of a step. Repeated, it returns the same, or the present outcome."""
        accepted = self._accepted.get(worker)
        if accepted is not None and accepted.step == step:
            return "accepted"
        if step < self.step:
            return "late"
        self._arrived.add(worker)
        self._decide()
        return "waiting" if worker in self._arrived else "accepted"

    def accepted(self, worker: int) -> Accepted | None:
        """Return the last step of which this worker is part."""
        return self._accepted.get(worker)

    def decide(self) -> Accepted | None:
        """Decide the present step with the arrivals so far; None if there are none."""
        if not self._arrived:
            return None
        decided = Accepted(self.step, len(self._arrived))
        self._accepted |= dict.fromkeys(self._arrived, decided)
        self._arrived.clear()
        self.step += 1
        return decided

    def _decide(self) -> None:
        if len(self._arrived) >= max(1, len(self._holding | self._arrived) - self._num_backups):
            self.decide()


@final
@dataclass(frozen=True, slots=True)
class ArrivedGradient:
    """The arrival of a worker's gradient.

    Attributes:
        sender: The worker.
        change: Closure and index of the gradient's key.
        step: The step of the gradient.
    """

    sender: Sender
    change: tuple[int, int]
    step: int


@final
class SyncSteps:
    """The workers that hold a closure, and the steps that their gradients make up."""

    def __init__(self, consistency: Consistency) -> None:
        self._quorum = Quorum(consistency.num_backups) if isinstance(consistency, SyncWithBackups) else None
        self._present: dict[int, tuple[int, int]] = {}  # generation and closure of each worker
        self._arrivals: dict[int, ArrivedGradient] = {}  # the last of each worker
        self._left_behind: dict[Sender, Accepted] = {}  # steps of which dead workers were part
        self._owed: set[tuple[int, int]] = set()  # changes of dead workers that some servers may have

    @property
    def in_steps(self) -> bool:
        """True if workers arrive, as under SyncWithBackups."""
        return self._quorum is not None

    @property
    def open_step(self) -> int:
        """The step for which arrivals are accepted; present values may still be of the step before."""
        return 0 if self._quorum is None else self._quorum.step

    def begin(self, sender: Sender, closure: int) -> None:
        """Record that a worker begins a closure; repeated, it counts once."""
        if self._present.get(sender.worker) == (sender.generation, closure):
            return
        self._present[sender.worker] = sender.generation, closure
        if self._quorum is not None:
            self._quorum.begin(sender.worker)

    def end(self, sender: Sender) -> None:
        """Record that a worker holds no closure any more."""
        self._leave(sender, lambda quorum: quorum.end(sender.worker))

    def fence(self, sender: Sender) -> Accepted | None:
        """Remove a dead worker; return the last step for which its gradient was accepted, pushed or not."""
        generation, _ = self._present.get(sender.worker, (sender.generation, -1))
        if generation > sender.generation:  # a later generation is at work: this is a repetition
            return self._left_behind.get(sender)
        arrival = self._arrivals.pop(sender.worker, None)
        accepted = None if arrival is None else self.accepted(arrival)
        if arrival is not None and accepted is not None:
            self._left_behind[sender] = accepted
            self._owed.add(arrival.change)
        self._leave(sender, lambda quorum: quorum.forget(sender.worker))
        return self._left_behind.get(sender)

    def arrive(self, sender: Sender, key: PushKey, step: int) -> ArrivedGradient | None:
        """Record a worker's gradient of a step; None if it is late. Repeated, it counts once."""
        if self._quorum is None:
            return None
        change = key.closure, key.index
        arrival = self._arrivals.get(sender.worker)
        if arrival is None or (arrival.sender, arrival.change) != (sender, change):
            self._owed = {owed for owed in self._owed if owed[0] >= key.finished_below}
            arrival = ArrivedGradient(sender, change, max(step, self._quorum.step) if change in self._owed else step)
        if self._quorum.arrive(sender.worker, arrival.step) == "late":
            return None
        self._arrivals[sender.worker] = arrival
        return arrival

    def accepted(self, arrival: ArrivedGradient) -> Accepted | None:
        """Return the step of which an arrival is part, once decided."""
        accepted = None if self._quorum is None else self._quorum.accepted(arrival.sender.worker)
        return accepted if accepted is not None and accepted.step == arrival.step else None

    def decide(self) -> Accepted | None:
        """Decide the present step with the arrivals so far; None if there are none."""
        return None if self._quorum is None else self._quorum.decide()

    def _leave(self, sender: Sender, leave: Callable[[Quorum], None]) -> None:
        self._present.pop(sender.worker, None)
        if self._quorum is not None:
            leave(self._quorum)


SyncRequest = BeginClosure | EndClosure | Arrive | DropArrival | Finish | FenceWorker


@final
class SyncRequests:
    """Answers requests about closures, now or later."""

    def __init__(
        self,
        sync: SyncSteps,
        changes: Changes,
        values: PsSlices,
        applied_updates: AppliedUpdates,
        delayed: DelayedAnswers,
        stats: ServerStats,
    ) -> None:
        self._sync = sync
        self._changes = changes
        self._values = values
        self._applied_updates = applied_updates
        self._delayed = delayed
        self._stats = stats

    def take(self, request: SyncRequest) -> Reply:
        """Handle a request."""
        match request:
            case FenceWorker():
                return self._fence(request.sender), []
            case DropArrival():
                self._changes.drop(request.step, request.sender.worker, request.completes)
                return self.answer(), []
            case Finish():
                return self._finish(request)
            case _:
                return self._of_worker(request)

    def _of_worker(self, request: BeginClosure | EndClosure | Arrive) -> Reply:
        sender = request.sender
        if self._applied_updates.is_fenced(sender):
            return self.answer("fenced"), []
        match request:
            case BeginClosure():
                self._sync.begin(sender, request.closure)
                return ServerAnswer(self._values.version, "done", self._sync.open_step), []
            case EndClosure():
                self._sync.end(sender)
                return self.answer(), []
            case Arrive():
                return self._arrive(request)

    def may_read(self, pull: Pull) -> bool:
        """Return True once the step that the pull waits for has been applied."""
        return self._changes.step >= pull.at_least_step

    def once(self, sender: Sender | None, ready: Callable[[], bool], answer: Callable[[], Answered]) -> Reply:
        """Answer once `ready()` is true, or the sender is dead."""

        def is_fenced() -> bool:
            return sender is not None and self._applied_updates.is_fenced(sender)

        def now() -> Answered:
            return (self.answer("fenced"), []) if is_fenced() else answer()

        if is_fenced() or ready():
            return now()
        return self._delayed.add(lambda: is_fenced() or ready(), now)

    def answer(self, verdict: Verdict = "done") -> ServerAnswer:
        """Return an answer with the present version and step."""
        return ServerAnswer(self._values.version, verdict, self._changes.step)

    def _fence(self, sender: Sender) -> ServerAnswer:
        self._applied_updates.fence(sender)
        accepted = self._sync.fence(sender)
        if accepted is None:
            return self.answer()
        return ServerAnswer(self._values.version, "done", accepted.step, accepted.completes)

    def _finish(self, request: Finish) -> Reply:
        if request.step >= 0:
            self._changes.expect(request.step, request.completes)
            if not request.completes:
                return self.answer(), []
            return self._changes.once_applied(request.step, lambda: (self.answer(), []))
        decided = self._sync.decide()
        if decided is None:
            return self.answer(), []
        return ServerAnswer(self._values.version, "done", decided.step, decided.completes), []

    def _arrive(self, request: Arrive) -> Reply:
        if not self._sync.in_steps:
            raise InvalidArgumentError(
                f"Workers must arrive under rd.SyncWithBackups only, but worker {request.sender.worker} did. Push "
                "without a step instead."
            )
        arrival = self._sync.arrive(request.sender, request.key, request.step)
        if arrival is None:
            self._stats.late += 1
            return self.answer("late"), []

        def answered() -> Answered:
            accepted = self._sync.accepted(arrival)
            completes = 0 if accepted is None else accepted.completes
            return ServerAnswer(self._values.version, "applied", arrival.step, completes), []

        return self.once(request.sender, lambda: self._sync.accepted(arrival) is not None, answered)
