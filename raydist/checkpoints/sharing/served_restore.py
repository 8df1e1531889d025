"""A worker's half of a restore of what lies on parameter servers: it knows what they call the tables, and asks them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from raydist.checkpoints.sharing.restore_orders import RestoreOrder, StoredTable
from raydist.checkpoints.sharing.restore_request import RestoreRequest
from raydist.checkpoints.sharing.served_share import SliceDirectory
from raydist.parameter_servers.restore_requests import BeginRestore
from raydist.parameter_servers.rows.saved_rows import SavedRows
from raydist.parameter_servers.worker.client import Ask

__all__ = ["ServedRestores", "begin_served_restore"]


@final
class ServedRestores:
    """Used by a worker's one thread.

    Args:
        held: What it knows of the servers.
    """

    def __init__(self, held: SliceDirectory) -> None:
        self._held = held

    def begin(self, request: RestoreRequest, objects: Mapping[str, SavedRows]) -> None:
        """Have every server begin to read the rows that it owns.

        Args:
            request: What to do.
            objects: The tables to restore, as they are here.
        """
        tables = tuple(
            StoredTable(self._held.handle_of(table.weight), request.saved[name], path)
            for name, obj in objects.items()
            for path, table in obj.tables().items()
        )
        order = BeginRestore(RestoreOrder(request.token, request.checkpoint, tables))
        self._held.exchange({server: Ask(order) for server in range(self._held.num_servers)})


def begin_served_restore(restores: ServedRestores, request: RestoreRequest, objects: Mapping[str, SavedRows]) -> None:
    """The function that a worker runs while no other runs any."""
    restores.begin(request, objects)
