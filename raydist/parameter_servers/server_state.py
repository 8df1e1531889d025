"""The state of one parameter server: slices, optimizers, embedding tables. Single-threaded."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from raydist.core.errors import InvalidArgumentError
from raydist.core.machine import free_memory
from raydist.parameter_servers.optimizers import state_bytes_per_byte
from raydist.parameter_servers.requests import (
    AddOptimizer,
    BeginRestore,
    BeginSave,
    CommitRestore,
    CreateSlices,
    CreateTable,
    DiscardRestore,
    DropObjects,
    OptimizerGroup,
    OptimizerState,
    ReadReport,
    RowState,
    SaveReport,
    ServerRequest,
    SetOptimizerState,
    SetRowState,
)
from raydist.parameter_servers.row_table import RowTable
from raydist.parameter_servers.server_optimizer import ServerOptimizer
from raydist.parameter_servers.server_slices import PsSlices


class ServerSaver(ABC):
    """Writes one server's part of checkpoints: see `checkpoints.ps_save.ServerWriter`."""

    @abstractmethod
    def begin(self, order: Any, tensors: Sequence[torch.Tensor], held: ServerState) -> None:
        """Copy the ordered values, and write them in a thread. An order that was carried out before changes nothing.

        Args:
            order: The description of what to write; `report` tells errors.
            tensors: Further tensors of the order; not kept after this returns.
            held: The server's state.
        """

    @abstractmethod
    def report(self, token: str) -> Any:
        """Return the outcome of a save; None until it is known."""

    @abstractmethod
    def close(self, within_s: float) -> None:
        """Wait for saves that are being written."""


class ServerRestorer(ABC):
    """Reads one server's part of checkpoints: see `checkpoints.ps_reader.ServerReader`."""

    @abstractmethod
    def begin(self, order: Any, held: ServerState) -> None:
        """Begin to read in a thread; `report` tells errors. An order that was begun before changes nothing."""

    @abstractmethod
    def report(self, token: str) -> Any:
        """Return the outcome of a read; None until it is known."""

    @abstractmethod
    def commit(self, token: str, held: ServerState) -> None:
        """Replace the values by the ones read. FailedPreconditionError if none were read, without a change."""

    @abstractmethod
    def discard(self) -> None:
        """Drop what was read, and what is being read."""

    @abstractmethod
    def close(self, within_s: float) -> None:
        """Discard, and wait for the thread."""


@final
class ServerState:
    """Creates, finds and saves a server's objects; other classes change their values.

    Args:
        memory: Bytes that the server may hold; None: as many as the machine has.
    """

    def __init__(
        self,
        number: int,
        num_servers: int,
        *,
        memory: int | None,
        saver: ServerSaver | None = None,
        restorer: ServerRestorer | None = None,
    ) -> None:
        self._number = number
        self._num_servers = num_servers
        self._memory = memory
        self._saver = saver
        self._restorer = restorer
        self.values = PsSlices(number, self._room)
        self.optimizers: dict[int, ServerOptimizer] = {}
        self.tables: dict[int, RowTable] = {}

    def manage(self, request: ServerRequest, tensors: Sequence[torch.Tensor]) -> Any:
        """Handle a request, and return the `value` of its answer."""
        match request:
            case CreateSlices():
                return self.values.create(request.slices, tensors)
            case DropObjects():
                return self._drop(request)
            case AddOptimizer():
                return self._add_optimizer(request)
            case OptimizerState():
                return self._optimizer(request.optimizer).state()
            case SetOptimizerState():
                return self._optimizer(request.optimizer).set_state(request.states)
            case CreateTable() | RowState() | SetRowState():
                return self._manage_table(request)
            case _:
                return self._manage_checkpoints(request, tensors)

    def _manage_table(self, request: CreateTable | RowState | SetRowState) -> Any:
        match request:
            case CreateTable():
                if request.handle not in self.tables:
                    self.tables[request.handle] = RowTable(request.spec, self._number, self._num_servers)
                return None
            case RowState():
                return self.table(request.handle).state()
            case SetRowState():
                return self.table(request.handle).load(request.value)

    def _manage_checkpoints(self, request: ServerRequest, tensors: Sequence[torch.Tensor]) -> Any:
        match request, self._saver, self._restorer:
            case BeginSave(), ServerSaver() as saver, _:
                return saver.begin(request.order, tensors, self)
            case SaveReport(), ServerSaver() as saver, _:
                return saver.report(request.token)
            case BeginRestore(), _, ServerRestorer() as restorer:
                return restorer.begin(request.order, self)
            case ReadReport(), _, ServerRestorer() as restorer:
                return restorer.report(request.token)
            case CommitRestore(), _, ServerRestorer() as restorer:
                return restorer.commit(request.token, self)
            case DiscardRestore(), _, ServerRestorer() as restorer:
                return restorer.discard()
            case _:
                raise InvalidArgumentError(
                    f"Parameter servers must be asked by a ServerRequest that they know, got {type(request).__name__}. "
                    "Use the same version of raydist everywhere."
                )

    def table(self, handle: int) -> RowTable:
        """Return an embedding table."""
        if handle not in self.tables:
            raise InvalidArgumentError(
                f"Embedding tables must be created before they are asked for, but parameter server {self._number} has "
                f"{sorted(self.tables)} and not {handle}. Create it first."
            )
        return self.tables[handle]

    def replace(
        self,
        tables: Mapping[int, RowTable],
        values: Mapping[int, torch.Tensor],
        states: Mapping[int, Mapping[int, Mapping[str, Any]]],
    ) -> None:
        """Replace present values, all or none: no reader sees a part of the change.

        Workers keep no rows, and read the values again, whose version is newer.

        Args:
            tables: Tables by handle.
            values: Values of slices, by number.
            states: States by optimizer handle and slice number; the optimizer owns the tensors from now on.
        """
        for handle in tables:
            self.table(handle)  # raises if the table was never created
        for handle, mine in states.items():
            self._optimizer(handle).require_slices(mine)
        if values:
            self.values.replace(values)
        for handle, mine in states.items():
            self._optimizer(handle).replace_state(mine)
        self.tables.update(tables)

    def value(self, number: int) -> torch.Tensor:
        """Return a slice's values, which the next request may change."""
        return self.values.value(number)

    def state(self, optimizer: int, number: int) -> Mapping[str, Any]:
        """Return an optimizer's state of a slice, which the next request may change."""
        return self._optimizer(optimizer).remembered(number)

    def optimizer_kind(self, handle: int) -> type[torch.optim.Optimizer]:
        """Return an optimizer's class."""
        return self._optimizer(handle).kind

    def table_state(self, handle: int) -> Mapping[str, Any]:
        """Return copies of all rows of a table."""
        return self.table(handle).state()

    def close(self, within_s: float) -> None:
        """Wait for reads and writes of checkpoints. May be called twice."""
        for each in (self._restorer, self._saver):
            if each is not None:
                each.close(within_s)

    @property
    def num_bytes(self) -> int:
        """Size of all objects, including optimizer states, in bytes."""
        optimizers = sum(optimizer.num_bytes for optimizer in self.optimizers.values())
        return self.values.num_bytes + optimizers + sum(table.num_bytes for table in self.tables.values())

    def _drop(self, request: DropObjects) -> None:
        for handle in request.handles:
            self.optimizers.pop(handle, None)
        for optimizer in self.optimizers.values():
            optimizer.drop(request.slices, request.handles)
        for handle in request.handles:
            self.tables.pop(handle, None)
        self.values.drop(request.slices)

    def _add_optimizer(self, request: AddOptimizer) -> None:
        known = self.optimizers.get(request.handle)
        kind = pickle.loads(request.kind)
        self._require_room_to_remember(kind, request.groups, frozenset() if known is None else known.known)
        if known is not None:
            known.change_groups(request.groups)
        else:
            self.optimizers[request.handle] = ServerOptimizer(kind, request.groups, self.values, self.tables)

    def _require_room_to_remember(
        self, kind: type[torch.optim.Optimizer], groups: Sequence[OptimizerGroup], known: frozenset[int]
    ) -> None:
        fresh = [[self.values.slice(each) for each in group.slices if each not in known] for group in groups]
        needed = sum(
            int(state_bytes_per_byte(kind, group.options) * sum(each.num_bytes for each in mine))
            for group, mine in zip(groups, fresh, strict=True)
            if mine
        )
        room = self._room()
        if room is not None and needed > room:
            raise InvalidArgumentError(
                f"What optimizers remember must fit into the memory of the servers, but parameter server "
                f"{self._number} is to hold {needed:,} bytes for a {kind.__name__} and has {room:,} free: "
                f"{needed - room:,} too few. Use more servers (num_ps, on other machines), or give them more memory."
            )

    def _optimizer(self, handle: int) -> ServerOptimizer:
        if handle not in self.optimizers:
            raise InvalidArgumentError(
                f"Optimizers must be added before they are asked for, but parameter server {self._number} has "
                f"{sorted(self.optimizers)} and not {handle}. Add it first."
            )
        return self.optimizers[handle]

    def _room(self) -> int | None:
        free = free_memory()
        if self._memory is None:
            return free
        left = max(0, self._memory - self.num_bytes)
        return left if free is None else min(free, left)
