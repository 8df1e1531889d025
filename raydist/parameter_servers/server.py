"""One parameter server, which answers requests one after the other. Its process does not matter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

import torch

from raydist.core.errors import InvalidArgumentError
from raydist.parameter_servers.consistency import Consistency, require_consistency
from raydist.parameter_servers.requests import Assign, Pull, PullRows, Push, ServerRequest, Statistics, WriteStates
from raydist.parameter_servers.server_stats import ServerStats
from raydist.parameter_servers.serving.changes import (
    Answered,
    AppliedUpdates,
    Changes,
    DelayedAnswer,
    DelayedAnswers,
    Reply,
)
from raydist.parameter_servers.serving.checkpointing import PartRestorer, SliceSaver
from raydist.parameter_servers.serving.server_state import ServerState
from raydist.parameter_servers.serving.sync_steps import SyncRequest, SyncRequests, SyncSteps

_SAVE_S = 2.0  # closing a strategy has waited for its saves before


@final
class ParameterServer:
    """A parameter server and its state, for one thread at a time. It never blocks.

    Args:
        number: Number of the server. Server 0 decides the synchronous steps of all servers.
        num_servers: Number of servers.
        consistency: How far workers may be apart.
        memory: Bytes that the server may hold; None: as many as the machine has.
        saver: Writes the server's part of checkpoints.
        restorer: Reads the server's part of checkpoints.

    Raises:
        InvalidArgumentError: `consistency` is no consistency model.
    """

    def __init__(
        self,
        number: int,
        num_servers: int,
        consistency: Consistency = "async",
        *,
        memory: int | None = None,
        saver: SliceSaver | None = None,
        restorer: PartRestorer | None = None,
    ) -> None:
        sync = SyncSteps(require_consistency(consistency))
        self._stats, self._delayed, applied_updates = ServerStats(number), DelayedAnswers(), AppliedUpdates()
        self._state = ServerState(
            number,
            num_servers,
            memory=memory,
            saver=saver,
            restorer=restorer,
        )
        values = self._values = self._state.values
        self._changes = Changes(values, self._state.optimizers, applied_updates, self._delayed, self._stats)
        self._sync = SyncRequests(sync, self._changes, values, applied_updates, self._delayed, self._stats)

    def handle(self, request: ServerRequest, tensors: Sequence[torch.Tensor] = ()) -> Reply:
        """Handle a request.

        Args:
            request: The request.
            tensors: Tensors of the request; the server keeps none of them after this returns.

        Returns:
            The answer and its tensors, which may be the server's own values: copy them before the next request. Or
            `DelayedAnswer`: `due` returns the answer later.

        Raises:
            InvalidArgumentError: The request is invalid; nothing was changed.
        """
        match request:
            case Push():
                return self._changes.push(request, tensors)
            case Pull():
                return self._pull(request)
            case PullRows():
                return self._pull_rows(request, tensors)
            case Assign():
                return self._changes.assign(request, tensors)
            case WriteStates():
                return self._changes.write_states(request)
            case Statistics():
                return replace(self._sync.answer(), value=self.stats), []
            case _ if isinstance(request, SyncRequest):
                return self._sync.take(request)
            case _:
                value = self._state.manage(request, tensors)
                return replace(self._sync.answer(), value=value), []

    def due(self) -> list[tuple[DelayedAnswer, Answered | Exception]]:
        """Return the delayed answers that are ready, each once: call it after every request.

        Their tensors may be the server's own values, like those of `handle`. An exception belongs to its request.
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
        """Wait for saves that are being written. May be called twice."""
        self._state.close(_SAVE_S)

    def _pull(self, request: Pull) -> Reply:
        for number in request.slices:
            self._values.slice(number)
        return self._sync.once(request.sender, lambda: self._sync.may_read(request), lambda: self._pulled(request))

    def _pulled(self, request: Pull) -> Answered:
        if request.unless == self._values.version:
            return self._sync.answer(), []
        return self._sync.answer(), self._counted([self._values.value(number) for number in request.slices])

    def _pull_rows(self, request: PullRows, tensors: Sequence[torch.Tensor]) -> Answered:
        if len(tensors) != 1 or tensors[0].dtype != torch.int64:
            raise InvalidArgumentError(
                f"Rows must be asked for by one int64 tensor of their numbers, got {[each.dtype for each in tensors]}. "
                "Pull each table for itself."
            )
        return self._sync.answer(), self._counted([self._state.table(request.handle).pull(tensors[0])])

    def _counted(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        self._stats.pulls += 1
        self._stats.bytes_pulled += sum(tensor.nbytes for tensor in tensors)
        return tensors
