"""A parameter server that answers one request after the other, independent of process and transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import final

import torch

from raydist.core.errors import InvalidArgumentError
from raydist.parameter_servers.changes import (
    Answered,
    AppliedUpdates,
    Changes,
    DelayedAnswer,
    DelayedAnswers,
    Reply,
)
from raydist.parameter_servers.consistency import Consistency, SyncWithBackups, require_consistency
from raydist.parameter_servers.requests import (
    Arrive,
    Assign,
    BeginClosure,
    DropArrival,
    EndClosure,
    FenceWorker,
    Finish,
    Pull,
    PullRows,
    Push,
    Sender,
    ServerAnswer,
    ServerRequest,
    ServerStats,
    Statistics,
    Verdict,
    WriteStates,
)
from raydist.parameter_servers.server_state import ServerRestorer, ServerSaver, ServerState
from raydist.parameter_servers.sync_steps import SyncSteps

_SAVE_S = 2.0  # a strategy waits for its saves before it closes its servers


@final
class ParameterServer:
    """A parameter server and its state. Not thread-safe. `handle` never blocks.

    Args:
        number: Number of the server. Server 0 decides for all servers which gradients make up a synchronous step.
        memory: Bytes that the server may hold; None: as many as the machine has free.
    """

    def __init__(
        self,
        number: int,
        num_servers: int,
        consistency: Consistency = "async",
        *,
        memory: int | None = None,
        saver: ServerSaver | None = None,
        restorer: ServerRestorer | None = None,
    ) -> None:
        require_consistency(consistency)
        self._is_synchronous = isinstance(consistency, SyncWithBackups)
        self._sync = SyncSteps(consistency.num_backups if isinstance(consistency, SyncWithBackups) else 0)
        self._stats, self._delayed, self._applied_updates = ServerStats(number), DelayedAnswers(), AppliedUpdates()
        self._state = ServerState(number, num_servers, memory=memory, saver=saver, restorer=restorer)
        self._values = self._state.values
        self._changes = Changes(self._values, self._state.optimizers, self._applied_updates, self._delayed, self._stats)

    def handle(self, request: ServerRequest, tensors: Sequence[torch.Tensor] = ()) -> Reply:
        """Handle a request.

        Args:
            tensors: Tensors of the request. The server does not keep the tensors after the call.

        Returns:
            The answer and its tensors, or a `DelayedAnswer` whose answer `due` returns later. The tensors may be the
            server's own values: copy the tensors before the next request.
        """
        match request:
            case Push():
                return self._changes.push(request, tensors)
            case Pull():
                return self._pull(request)
            case PullRows():
                return self._pull_rows(request, tensors)
            case Assign() | WriteStates():
                return self._changes.write(request, tensors)
            case BeginClosure() | EndClosure() | Arrive():
                return self._handle_closure_request(request)
            case FenceWorker() | DropArrival() | Finish():
                return self._handle_driver_request(request)
            case Statistics():
                return replace(self._answer(), value=self.stats), []
            case _:
                value = self._state.manage(request, tensors)  # first, because a request may change the version
                return replace(self._answer(), value=value), []

    def due(self) -> list[tuple[DelayedAnswer, Answered | Exception]]:
        """Return the delayed answers that are ready, each once. Call `due` after every request.

        As with `handle`, the tensors may be the server's own values. An exception is the answer to a failed request.
        """
        return self._delayed.due()

    @property
    def num_waiting(self) -> int:
        """Number of requests without an answer."""
        return len(self._delayed)

    @property
    def stats(self) -> ServerStats:
        """Statistics since the start."""
        staleness = dict(sorted(self._stats.staleness.items()))
        held, version = self._state.num_bytes, self._values.version
        return replace(self._stats, bytes_held=held, staleness=staleness, version=version)

    def close(self) -> None:
        """Wait for reads and writes of checkpoints, for up to 2 s each. May be called twice."""
        self._state.close(_SAVE_S)

    def _answer(self, verdict: Verdict = "done") -> ServerAnswer:
        """Return an answer with the current version and step."""
        return ServerAnswer(self._values.version, verdict, self._changes.step)

    def _answer_when(self, sender: Sender | None, ready: Callable[[], bool], answer: Callable[[], Answered]) -> Reply:
        """Answer as soon as `ready()` returns True or the sender is fenced."""

        def is_fenced() -> bool:
            return sender is not None and self._applied_updates.is_fenced(sender)

        def now() -> Answered:
            return (self._answer("fenced"), []) if is_fenced() else answer()

        if is_fenced() or ready():
            return now()
        return self._delayed.add(lambda: is_fenced() or ready(), now)

    def _pull(self, request: Pull) -> Reply:
        for number in request.slices:
            self._values.slice(number)
        return self._answer_when(
            request.sender, lambda: self._changes.step >= request.at_least_step, lambda: self._pull_answer(request)
        )

    def _pull_answer(self, request: Pull) -> Answered:
        if request.unless == self._values.version:
            return self._answer(), []
        return self._answer(), self._count_pull([self._values.value(number) for number in request.slices])

    def _pull_rows(self, request: PullRows, tensors: Sequence[torch.Tensor]) -> Answered:
        if len(tensors) != 1 or tensors[0].dtype != torch.int64:
            raise InvalidArgumentError(
                f"Rows must be asked for by one int64 tensor of their numbers, got {[each.dtype for each in tensors]}. "
                "Pull each table for itself."
            )
        return self._answer(), self._count_pull([self._state.table(request.handle).pull(tensors[0])])

    def _count_pull(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        self._stats.pulls += 1
        self._stats.bytes_pulled += sum(tensor.nbytes for tensor in tensors)
        return tensors

    def _handle_closure_request(self, request: BeginClosure | EndClosure | Arrive) -> Reply:
        if self._applied_updates.is_fenced(request.sender):
            return self._answer("fenced"), []
        match request:
            case BeginClosure():
                self._sync.begin(request.sender, request.closure)
                return ServerAnswer(self._values.version, "done", self._sync.step), []
            case EndClosure():
                self._sync.end(request.sender)
                return self._answer(), []
            case Arrive():
                return self._arrive(request)

    def _arrive(self, request: Arrive) -> Reply:
        if not self._is_synchronous:
            raise InvalidArgumentError(
                f"Workers must arrive under rd.SyncWithBackups only, but worker {request.sender.worker} did. Push "
                "without a step instead."
            )
        arrival = self._sync.arrive(request.sender, request.key, request.step)
        if arrival is None:
            self._stats.late += 1
            return self._answer("late"), []

        def answered() -> Answered:
            return ServerAnswer(self._values.version, "applied", arrival.step, arrival.completes), []

        return self._answer_when(request.sender, lambda: arrival.completes > 0, answered)

    def _handle_driver_request(self, request: FenceWorker | DropArrival | Finish) -> Reply:
        match request:
            case FenceWorker():
                return self._fence(request.sender), []
            case DropArrival():
                self._changes.drop(request.step, request.sender.worker, request.completes)
                return self._answer(), []
            case Finish():
                return self._finish(request)

    def _fence(self, sender: Sender) -> ServerAnswer:
        self._applied_updates.fence(sender)
        arrival = self._sync.fence(sender)
        if arrival is None:
            return self._answer()
        return ServerAnswer(self._values.version, "done", arrival.step, arrival.completes)

    def _finish(self, request: Finish) -> Reply:
        if request.step >= 0:
            self._changes.expect(request.step, request.completes)
            if not request.completes:
                return self._answer(), []
            return self._changes.once_applied(request.step, lambda: (self._answer(), []))
        step, completes = self._sync.step, self._sync.decide()
        return (ServerAnswer(self._values.version, "done", step, completes) if completes else self._answer()), []
