"""Rows of embedding tables on servers: pulled when a module needs them, pushed when an optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch

from raydist.errors import FailedPreconditionError
from raydist.parameter_servers.row_requests import CreateTable, PullRows, RowState, SetRowState
from raydist.parameter_servers.rows.access import spec_of
from raydist.parameter_servers.rows.table_spec import EmbeddingTableSpec
from raydist.parameter_servers.worker.client import Ask, ServerClient

__all__ = ["ServedRows", "rows_by_server"]


@final
class ServedRows:
    """The access to rows on servers (a `RowAccess`), for one thread.

    Args:
        client: The connection to the servers.
        handle_of: Returns the handle of a parameter that stands for a table; None if the servers do not have the table.
    """

    def __init__(self, client: ServerClient, handle_of: Callable[[torch.Tensor], int | None]) -> None:
        self._client = client
        self._handle_of = handle_of

    def create(self, weight: torch.Tensor, states: Sequence[Mapping[str, Any]]) -> None:
        """Create a table on the servers, with these rows."""
        handle, spec = self._known(weight)
        self._ask_all(CreateTable(handle, spec))
        if states:
            self.import_rows(weight, states)

    def pull(self, weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Implement `RowAccess.pull`."""
        handle, spec = self._known(weight)
        places = rows_by_server(spec, rows, self._client.num_servers)
        request = PullRows(handle, self._client.sender)
        answers = self._client.exchange({server: Ask(request, [rows[at]]) for server, at in places.items()})
        found = torch.empty((len(rows), spec.dim), dtype=spec.dtype)
        for server, at in places.items():
            found[at] = answers[server][1][0]
        return found

    def export_rows(self, weight: torch.Tensor) -> list[dict[str, Any]]:
        """Implement `RowAccess.export_rows`."""
        handle, _ = self._known(weight)
        return [answer.value for answer in self._ask_all(RowState(handle))]

    def import_rows(self, weight: torch.Tensor, states: Sequence[Mapping[str, Any]]) -> None:
        """Implement `RowAccess.import_rows`."""
        handle, _ = self._known(weight)
        self._ask_all(SetRowState(handle, list(states)))

    def _ask_all(self, request: Any) -> list[Any]:
        return self._client.ask_all(request)

    def _known(self, weight: torch.Tensor) -> tuple[int, EmbeddingTableSpec]:
        handle, spec = self._handle_of(weight), spec_of(weight)
        if handle is None or spec is None:
            raise FailedPreconditionError(
                "A ShardedEmbedding must be made under the scope of the strategy that runs the step, this one is not "
                "known to its servers. Create it inside `with strategy.scope():`."
            )
        return handle, spec


def rows_by_server(
    spec: EmbeddingTableSpec, rows: torch.Tensor, num_servers: int, *, everybody: bool = False
) -> dict[int, torch.Tensor | slice]:
    """Return the positions of each server's rows; of all servers with `everybody`, else of servers that have some."""
    if num_servers == 1:
        return {0: slice(None)}
    owners = spec.servers_of(rows, num_servers)
    found: dict[int, torch.Tensor | slice] = {}
    for server in range(num_servers):
        places = torch.nonzero(owners == server).reshape(-1)
        if len(places) or everybody:
            found[server] = places
    return found
