"""A parameter server's part of a restore: it is read in a thread, and becomes the server's once all have theirs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import final

from raydist.actors.portable_errors import PortableError, pack_error
from raydist.checkpoints.sharing.restore_orders import RestoreOrder, StoredTable
from raydist.checkpoints.sharing.restore_request import PreparedShare
from raydist.checkpoints.sharing.stored_rows import StoredRows
from raydist.checkpoints.sharing.stored_slices import StoredSlices
from raydist.errors import CancelledError, DataLossError, FailedPreconditionError, NotFoundError, RaydistError
from raydist.parameter_servers.serving.embedding_tables import ServedTable
from raydist.parameter_servers.serving.part_restorer import PartHolder, PartRestorer

__all__ = ["PartReader"]


@final
class PartReader(PartRestorer):
    """The restores of one server."""

    def __init__(self) -> None:
        self._reading: _Reading | None = None

    def begin(self, order: RestoreOrder, held: PartHolder) -> None:
        if self._reading is not None and self._reading.order.token == order.token:
            return  # its worker has died, and another one asks
        self.discard()
        self._reading = _Reading(order, held)
        self._reading.start()

    def report(self, token: str) -> PreparedShare | PortableError | None:
        reading = self._known(token)
        return None if reading is None else reading.outcome

    def commit(self, token: str, held: PartHolder) -> None:
        reading = self._known(token)
        if reading is None or reading.outcome != PreparedShare():
            raise FailedPreconditionError("raydist bug: a server must have read its part before it is given that.")
        held.replace(reading.tables, reading.slices.values, reading.slices.memories)
        self._reading = None

    def _known(self, token: str) -> _Reading | None:
        reading = self._reading
        return None if reading is None or reading.order.token != token else reading

    def discard(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.stop()

    def close(self, within_s: float) -> None:
        reading = self._reading
        self.discard()
        if reading is not None:
            reading.join(within_s)


@final
class _Reading:
    """One order on its way.

    Args:
        order: That.
        held: What the server has.

    Attributes:
        tables: By handle, those that rows go into: nobody has them yet.
        slices: All else.
    """

    def __init__(self, order: RestoreOrder, held: PartHolder) -> None:
        self.order = order
        self.tables: Mapping[int, ServedTable] = {
            table.handle: held.table(table.handle).anew() for table in order.tables
        }
        self.slices = StoredSlices(order, held, self._require_wanted)
        self.outcome: PreparedShare | PortableError | None = None
        self._is_wanted = True
        self._thread = threading.Thread(target=self._run, name="raydist-restore", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_wanted = False

    def join(self, within_s: float) -> None:
        self._thread.join(within_s)

    def _run(self) -> None:
        try:
            self.outcome = self._read()
        except Exception as error:
            self.outcome = pack_error(error)

    def _read(self) -> PreparedShare:
        if self.slices.differences:
            return PreparedShare(self.slices.differences)
        stored = {
            saved: StoredRows(self.order.checkpoint, saved, self._require_wanted)
            for saved in {table.saved for table in self.order.tables}
        }
        try:
            for each in stored.values():
                each.open()
            self.slices.open()
        except Exception as error:
            if isinstance(error, DataLossError) and not isinstance(error.__cause__, NotFoundError):
                raise
            return PreparedShare(sees_files=False)
        for table in self.order.tables:
            self._load(table, stored[table.saved])
        with self._none("a state that it has is none"):
            self.slices.read()
        return PreparedShare()

    def _load(self, table: StoredTable, stored: StoredRows) -> None:
        with self._none(f"the rows of {table.saved!r} are none"):
            self.tables[table.handle].load(stored.states(table.path))

    @contextlib.contextmanager
    def _none(self, problem: str) -> Iterator[None]:
        """What goes wrong inside does so because of what was saved."""
        try:
            yield
        except RaydistError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise self.order.checkpoint.loss(f"{problem}: {error!s:.300}") from error

    def _require_wanted(self) -> None:
        if not self._is_wanted:
            raise CancelledError(f"Restore {self.order.token} was given up before all was read. Begin another one.")
