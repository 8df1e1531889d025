"""The parameter server client of one process: it sends requests, and reads and writes slices and rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from raydist.core.errors import DeadlineExceededError, FailedPreconditionError
from raydist.parameter_servers.connection import ServerConnection, Targets, copy_to_targets
from raydist.parameter_servers.local_rows import spec_of
from raydist.parameter_servers.requests import (
    CreateTable,
    Pull,
    PullRows,
    RowState,
    Sender,
    ServerAnswer,
    ServerRequest,
    SetRowState,
)
from raydist.parameter_servers.slices import PsSlice
from raydist.parameter_servers.slicing import SlicesByHandle
from raydist.parameter_servers.table_spec import EmbeddingTableSpec


@final
@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """A request to one server."""

    request: ServerRequest  # the request without tensors
    tensors: Sequence[torch.Tensor] = ()  # see `ServerConnection.ask`
    # tensors that get the values of a `Pull`, or of the `pull` of a `Push`, in the order of the request
    into: Targets | None = None
    answer_bytes: int = 0  # see `ServerConnection.ask`; 0: the size of `into`


Answers = dict[int, tuple[ServerAnswer, Sequence[torch.Tensor]]]


def _num_bytes(into: Targets | None) -> int:
    return sum(target.nbytes for target in into.values()) if into else 0


@final
class ServerClient:
    """The connections to all servers, for one thread."""

    def __init__(self, connections: Sequence[ServerConnection], sender: Sender, *, timeout_s: float) -> None:
        self.sender = sender
        self.num_servers = len(connections)
        self._connections = tuple(connections)
        self._timeout_s = timeout_s

    def exchange(self, asks: Mapping[int, Ask]) -> Answers:
        """Send a request to each server in `asks`, wait for all answers, and copy values to their targets."""
        asked = {
            server: self._connections[server].ask(ask.request, ask.tensors, ask.answer_bytes or _num_bytes(ask.into))
            for server, ask in asks.items()
        }
        answers: Answers = {}
        failed: Exception | None = None
        for server, each in asked.items():
            try:
                answers[server] = each.answer(self._timeout_s)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed
        for server, ask in asks.items():
            if ask.into is not None:
                copy_to_targets(ask.into.values(), answers[server][1])
        return answers

    def ask(self, server: int, request: ServerRequest) -> ServerAnswer:
        """Send a request without tensors to one server."""
        return self.exchange({server: Ask(request)})[server][0]

    def ask_all(self, request: ServerRequest) -> list[ServerAnswer]:
        """Send the same request to all servers."""
        answers = self.exchange({server: Ask(request) for server in range(self.num_servers)})
        return [answers[server][0] for server in range(self.num_servers)]

    def read(self, wanted: Mapping[int, Targets], unless: Mapping[int, int] | None = None) -> dict[int, ServerAnswer]:
        """Copy the current values of slices, without waiting for a step. All values of one server have one version.

        Args:
            wanted: By server, the targets of slices.
            unless: By server, the version that the caller has. A server that still has this version sends no values.

        Returns:
            By server, an answer with the version of the values.
        """
        held = unless or {}
        asks = {
            server: Ask(Pull(tuple(into), unless=held.get(server, -1)), into=into)
            for server, into in wanted.items()
            if into
        }
        return {server: answer for server, (answer, _) in self.exchange(asks).items()}

    def read_step(self, wanted: Mapping[int, Targets], at_least: int) -> dict[int, ServerAnswer]:
        """Copy the values of slices like `read`, but with the values of all servers from the same synchronous step.

        Args:
            wanted: By server, the targets of slices. The call waits for all servers, also for those without targets.
            at_least: Number of the earliest step whose values the caller accepts.
        """
        answers: Answers = {}
        waiting = list(range(self.num_servers))
        end = time.monotonic() + self._timeout_s
        while waiting:
            if time.monotonic() > end:
                raise DeadlineExceededError(
                    f"All servers must be at the same step while a client reads their values, but new steps ended for "
                    f"{self._timeout_s:g} s. Make steps take longer, or use one server."
                )
            pulls = {
                server: Pull(tuple(wanted.get(server, ())), self.sender, at_least_step=at_least) for server in waiting
            }
            answers |= self.exchange(
                {server: Ask(pull, answer_bytes=_num_bytes(wanted.get(server))) for server, pull in pulls.items()}
            )
            at_least = max(answer.step for answer, _ in answers.values())
            waiting = [server for server, (answer, _) in answers.items() if answer.step < at_least]
        for server, targets in wanted.items():
            copy_to_targets(targets.values(), answers[server][1])
        return {server: answer for server, (answer, _) in answers.items()}


@final
class PsRows:
    """A `RowAccess` to rows on servers, for one thread.

    Args:
        handle_of: Returns the handle of a parameter that stands for a table; None if the servers do not have the table.
    """

    def __init__(self, client: ServerClient, handle_of: Callable[[torch.Tensor], int | None]) -> None:
        self._client = client
        self._handle_of = handle_of

    def create(self, weight: torch.Tensor, states: Sequence[Mapping[str, Any]]) -> None:
        """Create a table on the servers, with these rows."""
        handle, spec = self._known(weight)
        self._client.ask_all(CreateTable(handle, spec))
        if states:
            self.import_rows(weight, states)

    def pull(self, weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Implement `RowAccess.pull`."""
        handle, spec = self._known(weight)
        places = rows_by_server(spec, rows, self._client.num_servers)
        request = PullRows(handle, self._client.sender)
        asked = {server: rows[at] for server, at in places.items()}
        row_bytes = spec.dim * spec.dtype.itemsize
        answers = self._client.exchange(
            {server: Ask(request, [some], answer_bytes=len(some) * row_bytes) for server, some in asked.items()}
        )
        found = torch.empty((len(rows), spec.dim), dtype=spec.dtype)
        for server, at in places.items():
            found[at] = answers[server][1][0]
        return found

    def export_rows(self, weight: torch.Tensor) -> list[dict[str, Any]]:
        """Implement `RowAccess.export_rows`."""
        handle, _ = self._known(weight)
        return [answer.value for answer in self._client.ask_all(RowState(handle))]

    def import_rows(self, weight: torch.Tensor, states: Sequence[Mapping[str, Any]]) -> None:
        """Implement `RowAccess.import_rows`."""
        handle, _ = self._known(weight)
        self._client.ask_all(SetRowState(handle, list(states)))

    def _known(self, weight: torch.Tensor) -> tuple[int, EmbeddingTableSpec]:
        handle, spec = self._handle_of(weight), spec_of(weight)
        if handle is None or spec is None:
            raise FailedPreconditionError(
                "A ShardedEmbedding must be made under the scope of the strategy that runs the step, but the servers "
                "of this strategy do not know it. Create it inside `with strategy.scope():`."
            )
        return handle, spec


def rows_by_server(
    spec: EmbeddingTableSpec, rows: torch.Tensor, num_servers: int, *, all_servers: bool = False
) -> dict[int, torch.Tensor | slice]:
    """Return the positions of each server's rows in `rows`. Omit servers without rows, unless `all_servers`."""
    if num_servers == 1:
        return {0: slice(None)}
    owners = spec.servers_of(rows, num_servers)
    found: dict[int, torch.Tensor | slice] = {}
    for server in range(num_servers):
        places = torch.nonzero(owners == server).reshape(-1)
        if len(places) or all_servers:
            found[server] = places
    return found


@final
class PlacedVariables:
    """The variables and optimizers of one worker, and their slices on the servers, for saves and restores.

    Args:
        read_states: Copies optimizer states from the servers into this worker's optimizers.
    """

    def __init__(
        self,
        client: ServerClient,
        table: SlicesByHandle,
        get: Callable[[int], Any],
        handle_of: Callable[[Any], int | None],
        read_states: Callable[[list[torch.optim.Optimizer]], None],
    ) -> None:
        self.client = client
        self._table = table
        self._get = get
        self._handle_of = handle_of
        self.read_states = read_states

    def places(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[PsSlice, ...]]:
        """Return, by name, the slices of the tensors that are variables, in the order of their rows.

        A `state_dict` has detached variables. This function finds a detached variable by its memory, which no two
        variables share. A variable without elements has no memory. This function finds it only if `tensors` has the
        variable itself, which is enough for optimizer states.
        """
        variables = {handle: obj for handle in self._table if (obj := self._get(handle)) is not None}
        held = {obj.data_ptr(): handle for handle, obj in variables.items()}
        known = {name: self._handle_in(tensor, held, variables) for name, tensor in tensors.items()}
        return {name: self._table[handle] for name, handle in known.items() if handle is not None}

    def _handle_in(
        self, tensor: torch.Tensor, held: Mapping[int, int], variables: Mapping[int, torch.Tensor]
    ) -> int | None:
        """Return the handle of a tensor that is a variable, or that is detached from a variable; None for others."""
        handle = self._handle_of(tensor)
        if handle is None:
            handle = held.get(tensor.data_ptr())
            return handle if handle is not None and _is_detached_from(variables[handle], tensor) else None
        return handle if handle in variables else None

    def handle_of(self, obj: torch.optim.Optimizer | torch.Tensor) -> int:
        """Return the handle of an optimizer, or of the table that a parameter stands for."""
        handle = self._handle_of(obj)
        if handle is None:
            raise FailedPreconditionError(
                f"raydist bug: a {type(obj).__name__} must be mirrored to be saved by servers."
            )
        return handle


def _is_detached_from(variable: torch.Tensor, tensor: torch.Tensor) -> bool:
    same = tensor.data_ptr() == variable.data_ptr() and tensor.dtype == variable.dtype
    return same and tensor.numel() > 0 and tensor.shape == variable.shape and tensor.stride() == variable.stride()
