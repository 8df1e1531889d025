"""The handler of requests about closures under a rule of consistency: begin, arrive, end, death. Single-threaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from raydist.errors import InvalidArgumentError
from raydist.parameter_servers.closure_requests import (
    Arrive,
    BeginClosure,
    DropArrival,
    EndClosure,
    FenceWorker,
    Finish,
)
from raydist.parameter_servers.requests import Pull, Sender, ServerAnswer, Verdict
from raydist.parameter_servers.server_stats import ServerMeter
from raydist.parameter_servers.serving.changes import Changes
from raydist.parameter_servers.serving.ledger import Ledger
from raydist.parameter_servers.serving.served_slices import ServedSlices
from raydist.parameter_servers.serving.turns import Turns
from raydist.parameter_servers.serving.waiting import Answered, Reply, Waits

__all__ = ["TurnRequest", "TurnRequests"]

TurnRequest = BeginClosure | EndClosure | Arrive | DropArrival | Finish | FenceWorker


@final
class TurnRequests:
    """Answers requests about closures, now or later.

    Args:
        turns: The state of workers and steps.
        changes: Applies steps.
        values: Give the version in answers.
        ledger: The record of dead workers.
        waits: Delayed answers.
        meter: The server's counts.
    """

    def __init__(
        self,
        turns: Turns,
        changes: Changes,
        values: ServedSlices,
        ledger: Ledger,
        waits: Waits,
        meter: ServerMeter,
    ) -> None:
        self._turns = turns
        self._changes = changes
        self._values = values
        self._ledger = ledger
        self._waits = waits
        self._meter = meter

    def take(self, request: TurnRequest) -> Reply:
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
        if self._ledger.is_fenced(sender):
            return self.answer("fenced"), []
        match request:
            case BeginClosure():
                self._turns.begin(sender, request.closure)
                return ServerAnswer(self._values.version, "done", self._turns.open_step), []
            case EndClosure():
                self._turns.end(sender)
                return self.answer(), []
            case Arrive():
                return self._arrive(request)

    def may_read(self, pull: Pull) -> bool:
        """Return True once the step that the pull waits for has been applied."""
        return self._changes.step >= pull.at_least_step

    def once(self, sender: Sender | None, ready: Callable[[], bool], answer: Callable[[], Answered]) -> Reply:
        """Answer once `ready()` is true, or the sender is dead."""

        def is_fenced() -> bool:
            return sender is not None and self._ledger.is_fenced(sender)

        def now() -> Answered:
            return (self.answer("fenced"), []) if is_fenced() else answer()

        if is_fenced() or ready():
            return now()
        return self._waits.add(lambda: is_fenced() or ready(), now)

    def answer(self, verdict: Verdict = "done") -> ServerAnswer:
        """Return an answer with the present version and step."""
        return ServerAnswer(self._values.version, verdict, self._changes.step)

    def _fence(self, sender: Sender) -> ServerAnswer:
        self._ledger.fence(sender)
        accepted = self._turns.fence(sender)
        if accepted is None:
            return self.answer()
        return ServerAnswer(self._values.version, "done", accepted.step, accepted.completes)

    def _finish(self, request: Finish) -> Reply:
        if request.step >= 0:
            self._changes.expect(request.step, request.completes)
            if not request.completes:
                return self.answer(), []
            return self._changes.once_applied(request.step, lambda: (self.answer(), []))
        decided = self._turns.decide()
        if decided is None:
            return self.answer(), []
        return ServerAnswer(self._values.version, "done", decided.step, decided.completes), []

    def _arrive(self, request: Arrive) -> Reply:
        if not self._turns.in_steps:
            raise InvalidArgumentError(
                f"Workers must arrive under rd.SyncWithBackups only, but worker {request.sender.worker} did. Push "
                "without a step instead."
            )
        arrival = self._turns.arrive(request.sender, request.key, request.step)
        if arrival is None:
            self._meter.late += 1
            return self.answer("late"), []

        def answered() -> Answered:
            accepted = self._turns.accepted(arrival)
            completes = 0 if accepted is None else accepted.completes
            return ServerAnswer(self._values.version, "applied", arrival.step, completes), []

        return self.once(request.sender, lambda: self._turns.accepted(arrival) is not None, answered)
