"""What parameter servers are told of a restore: each reads what it has. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from raydist.checkpoints.entries import names_of_tensors
from raydist.checkpoints.saved_checkpoint import SavedCheckpoint
from raydist.checkpoints.sharing.restore_request import RestoreRequest
from raydist.parameter_servers.slices import ServedSlice

__all__ = ["RestoreOrder", "RestoreOrders", "StoredMemory", "StoredSlice", "StoredTable"]

_REST = 0  # the server that checks what no server takes


@final
@dataclass(frozen=True, slots=True)
class StoredTable:
    """An embedding table, and where a checkpoint has its rows.

    Attributes:
        handle: What servers call it.
        saved: The object of the checkpoint that has the rows of its module's tables.
        path: Of the table in that module.
    """

    handle: int
    saved: str
    path: str


@final
@dataclass(frozen=True, slots=True)
class StoredSlice:
    """A slice that a server has, and the tensor of which a checkpoint has its values.

    Attributes:
        number: Of the slice.
        saved: The object of the checkpoint that has the tensor.
        key: What the tensor is called there.
        begin: The slice's first row in it.
    """

    number: int
    saved: str
    key: str
    begin: int


@final
@dataclass(frozen=True, slots=True)
class StoredMemory:
    """What an optimizer is to remember of a slice.

    Attributes:
        owner: The optimizer's name, for messages.
        optimizer: What servers call it.
        number: Of the slice.
        saved: The object of the checkpoint that has it.
        parameter: What the variable is called there.
        shape: Of the variable.
        begin: The slice's first row in it.
        entry: What the checkpoint has of the variable, packed; None where that is nothing.
        options: Of the saved group.
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
        """Names of the tensors that belong to it, and whether the slice has its own rows of each, where there are."""
        return dict(names_of_tensors(self.entry))


@final
@dataclass(frozen=True, slots=True)
class RestoreOrder:
    """What one server is to do of a restore.

    Attributes:
        token: Tells it from others.
        checkpoint: What concerns servers of it.
        tables: Those to read, each with the rows that the server owns.
        slices: Those to read.
        memories: What optimizers are to remember.
        rest: By object of the checkpoint, tensors that no server takes: they are read and checked all the same.
    """

    token: str
    checkpoint: SavedCheckpoint
    tables: tuple[StoredTable, ...] = ()
    slices: tuple[StoredSlice, ...] = ()
    memories: tuple[StoredMemory, ...] = ()
    rest: Mapping[str, frozenset[str]] = field(default_factory=dict)


@final
class RestoreOrders:
    """The orders of one restore, gathered object by object.

    Args:
        request: The restore.
        num_servers: How many there are.
    """

    def __init__(self, request: RestoreRequest, num_servers: int) -> None:
        self._request = request
        self._num_servers = num_servers
        self._tables: list[StoredTable] = []
        self._slices: dict[int, tuple[int, StoredSlice]] = {}  # by number: with the server that has it
        self._memories: list[tuple[int, StoredMemory]] = []
        self._whole: list[str] = []

    def add_rows(self, name: str, tables: Mapping[str, int]) -> None:
        """Have rows of embedding tables restored: by path, their handles."""
        saved = self._request.saved[name]
        self._tables += [StoredTable(handle, saved, path) for path, handle in tables.items()]

    def add_values(self, name: str, places: Sequence[tuple[str, Sequence[ServedSlice]]]) -> None:
        """Have values of variables restored; of one that has several names the last counts, as where torch does it.

        Args:
            name: Of the module.
            places: Names of saved tensors, and the slices of the variables that they are for.
        """
        saved = self._request.saved[name]
        self._whole.append(saved)
        for key, parts in places:
            for part in parts:
                self._slices[part.number] = part.server, StoredSlice(part.number, saved, key, part.begin)

    def begin_memories(self, name: str) -> None:
        """Have what an optimizer remembers restored: `add_memory` says which."""
        self._whole.append(self._request.saved[name])

    def add_memory(self, part: ServedSlice, memory: StoredMemory) -> None:
        """Have it remember this of a slice."""
        self._memories.append((part.server, memory))

    def of(self, server: int) -> RestoreOrder:
        """What a server is asked to do."""
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
