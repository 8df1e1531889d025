"""Restore orders for parameter servers: each server reads its own values. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from raydist.checkpoints.entries import names_of_tensors
from raydist.checkpoints.saved_checkpoint import SavedCheckpoint
from raydist.checkpoints.sharing.restore_request import RestoreRequest
from raydist.parameter_servers.slices import ServedSlice

__all__ = ["RestoreOrder", "RestoreOrders", "StoredMemory", "StoredSlice", "StoredTable"]

_REST = 0  # the server that verifies tensors that no server takes


@final
@dataclass(frozen=True, slots=True)
class StoredTable:
    """An embedding table, and the location of its rows in a checkpoint.

    Attributes:
        handle: Handle of the table on the servers.
        saved: Object of the checkpoint with the rows of the module's tables.
        path: Path of the table in the module.
    """

    handle: int
    saved: str
    path: str


@final
@dataclass(frozen=True, slots=True)
class StoredSlice:
    """A slice on a server, and the saved tensor with its values.

    Attributes:
        number: Number of the slice.
        saved: Object of the checkpoint that has the tensor.
        key: Name of the tensor in that object.
        begin: Index of the slice's first row in the tensor.
    """

    number: int
    saved: str
    key: str
    begin: int


@final
@dataclass(frozen=True, slots=True)
class StoredMemory:
    """The optimizer state of one slice.

    Attributes:
        owner: Name of the optimizer, for messages.
        optimizer: Handle of the optimizer on the servers.
        number: Number of the slice.
        saved: Object of the checkpoint that has the state.
        parameter: Name of the variable in that object.
        shape: Shape of the variable.
        begin: Index of the slice's first row in the variable.
        entry: Saved state of the variable, packed; None if there is none.
        options: Options of the saved parameter group.
    """

    owner: str
    optimizer: int
    number: int
    saved: str
    parameter: str
    shape: tuple[int, ...]
    begin: int
    entry: Any
    options: Mapping[str, Any]

    def tensors(self) -> dict[str, bool]:
        """Return the names of the state's tensors; True for a tensor that may have the slice's own rows."""
        return dict(names_of_tensors(self.entry))


@final
@dataclass(frozen=True, slots=True)
class RestoreOrder:
    """The part of a restore that one server performs.

    Attributes:
        token: Unique id of the restore.
        checkpoint: The checkpoint, reduced to objects on servers.
        tables: Tables to read; of each, the rows that the server owns.
        slices: Slices to read.
        memories: Optimizer states to read.
        rest: By object of the checkpoint, tensors that no server takes, but that must be read and verified.
    """

    token: str
    checkpoint: SavedCheckpoint
    tables: tuple[StoredTable, ...] = ()
    slices: tuple[StoredSlice, ...] = ()
    memories: tuple[StoredMemory, ...] = ()
    rest: Mapping[str, frozenset[str]] = field(default_factory=dict)


@final
class RestoreOrders:
    """The orders of one restore, built object by object.

    Args:
        request: The restore.
        num_servers: Number of servers.
    """

    def __init__(self, request: RestoreRequest, num_servers: int) -> None:
        self._request = request
        self._num_servers = num_servers
        self._tables: list[StoredTable] = []
        self._slices: dict[int, tuple[int, StoredSlice]] = {}  # by slice number: the server and the slice
        self._memories: list[tuple[int, StoredMemory]] = []
        self._whole: list[str] = []

    def add_rows(self, name: str, tables: Mapping[str, int]) -> None:
        """Restore rows of embedding tables, given their handles by path."""
        saved = self._request.saved[name]
        self._tables += [StoredTable(handle, saved, path) for path, handle in tables.items()]

    def add_values(self, name: str, places: Sequence[tuple[str, Sequence[ServedSlice]]]) -> None:
        """Restore values of variables. For a variable with several names, the last counts, as in torch.

        Args:
            name: Name of the module.
            places: Names of saved tensors, and the slices of the variables that they are for.
        """
        saved = self._request.saved[name]
        self._whole.append(saved)
        for key, parts in places:
            for part in parts:
                self._slices[part.number] = part.server, StoredSlice(part.number, saved, key, part.begin)

    def begin_memories(self, name: str) -> None:
        """Restore the state of an optimizer; `add_memory` adds its parts."""
        self._whole.append(self._request.saved[name])

    def add_memory(self, part: ServedSlice, memory: StoredMemory) -> None:
        """Add the optimizer state of one slice."""
        self._memories.append((part.server, memory))

    def of(self, server: int) -> RestoreOrder:
        """Return the order for a server."""
        return RestoreOrder(
            self._request.token,
            self._request.checkpoint,
            tuple(self._tables),
            tuple(each for owner, each in self._slices.values() if owner == server),
            tuple(each for owner, each in self._memories if owner == server),
            self._rest() if server == _REST else {},
        )

    def _rest(self) -> dict[str, frozenset[str]]:
        taken = {(each.saved, each.key) for _, each in self._slices.values()}
        taken |= {(each.saved, key) for _, each in self._memories for key in each.tensors()}
        return {
            saved: frozenset(key for key in self._request.checkpoint.places(saved) if (saved, key) not in taken)
            for saved in self._whole
        }
