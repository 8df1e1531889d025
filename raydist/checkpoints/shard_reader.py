"""A replica's half of a restore: read and verify a shard of the files, exchange the shards, change the objects.

Nothing is changed before every replica holds all values and no replica waits for another one any more.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, final

import torch
from torch import nn

from raydist.actors.portable_errors import pack_error
from raydist.checkpoints.entries import stored_dtype
from raydist.checkpoints.object_state import sharded_tensors_of
from raydist.checkpoints.ps_reader import StoredRows
from raydist.checkpoints.ps_restore import differences_from, require_state
from raydist.checkpoints.read_tensors import read_slices
from raydist.checkpoints.restore import PreparedShard, RestoreRequest, load_states, refused
from raydist.checkpoints.tensor_file import FilePlace, TensorFile
from raydist.collectives.tensors import flat_bytes
from raydist.core.errors import DataLossError, FailedPreconditionError, NotFoundError
from raydist.parameter_servers.local_rows import LocalRows, access_to
from raydist.parameter_servers.row_table import RowTable
from raydist.parameter_servers.sharded_embedding import SavedRows
from raydist.utils.sharded_tensors import shard_like

WINDOW_BYTES = 16 << 20  # of one broadcast: large enough that its start-up cost is negligible, small on a device


def exchange_bytes(
    parts: Sequence[Sequence[torch.Tensor]],
    rank: int,
    device: torch.device,
    broadcast: Callable[[torch.Tensor, int], None],
    window_bytes: int = WINDOW_BYTES,
) -> None:
    """Fill tensors with the values that other replicas have read. All replicas call it together, and block.

    `parts` has contiguous CPU tensors for each rank, of the same shapes and dtypes in the same order on all replicas:
    this replica's own values, and memory for the others'. `broadcast` replaces a tensor by that of a rank.
    """
    if len(parts) == 1:
        return
    for root, tensors in enumerate(parts):
        for window in _windows([flat_bytes(tensor) for tensor in tensors], window_bytes):
            moved = torch.cat(window).to(device)
            broadcast(moved, root)
            if root != rank:
                for target, found in zip(window, moved.cpu().split([len(each) for each in window]), strict=True):
                    target.copy_(found)


def _windows(flats: Sequence[torch.Tensor], window_bytes: int) -> Iterator[list[torch.Tensor]]:
    window: list[torch.Tensor] = []
    room = window_bytes
    for flat in flats:
        while len(flat):
            window.append(flat[:room])
            flat = flat[room:]
            room -= len(window[-1])
            if not room:
                yield window
                window, room = [], window_bytes
    if window:
        yield window


@final
@dataclass(frozen=True, slots=True)
class PlannedRead:
    """The tensors that one replica reads from one file."""

    owner: str  # name of the object that the tensors belong to
    file: TensorFile  # the file
    # names of the tensors, or of the tensors of which the file has rows; empty for an index file
    keys: tuple[str, ...]


def plan_reads(files: Mapping[str, Sequence[TensorFile]], num_replicas: int) -> list[list[PlannedRead]]:
    """Return the reads of each replica, by rank: contiguous stretches of files.

    One replica reads all of a tensor or slice, because its checksum covers all of it.

    >>> from raydist.checkpoints.tensor_file import FilePlace
    >>> places = {key: FilePlace("U8", (4,), 8 + at, 12 + at, 0) for key, at in (("a", 0), ("b", 4))}
    >>> reads = plan_reads({"model": [TensorFile("model.safetensors", 16, 0, 8, 0, places)]}, 2)
    >>> [[read.keys for read in each] for each in reads]
    [[('a',)], [('b',)]]
    """
    total = sum(place.num_bytes for several in files.values() for file in several for place in file.tensors.values())
    reads: list[list[PlannedRead]] = [[] for _ in range(num_replicas)]
    before = 0
    for owner, several in files.items():
        for file in several:
            for rank, keys in _keys_by_rank(file, before, total, num_replicas).items():
                reads[rank].append(PlannedRead(owner, file, tuple(keys)))
            before += sum(place.num_bytes for place in file.tensors.values())
    return reads


def _keys_by_rank(file: TensorFile, before: int, total: int, num_replicas: int) -> dict[int, list[str]]:
    """Return the keys of a file by reading rank: the rank whose stretch of bytes contains the tensor's middle."""
    found: dict[int, list[str]] = {}
    for key, place in file.tensors.items():
        middle = before + place.begin - file.header_bytes + place.num_bytes // 2
        found.setdefault(min(middle * num_replicas // max(1, total), num_replicas - 1), []).append(key)
    return found or {0: []}


@final
class ShardReader:
    """The restores of one replica, which reads a shard of each. Used by the replica's thread.

    `exchange` fills tensors with the values that other replicas have read; `after` is called with the objects that were
    given the same states on all replicas.
    """

    def __init__(
        self,
        rank: int,
        num_replicas: int,
        exchange: Callable[[Sequence[Sequence[torch.Tensor]]], None],
        after: Callable[[Mapping[str, Any]], None] = lambda objects: None,
    ) -> None:
        self._rank, self._num_replicas = rank, num_replicas
        self._exchange = exchange
        self._after = after
        self._read: tuple[RestoreRequest, list[dict[str, torch.Tensor]]] | None = None  # by planned read
        self._tables: dict[str, list[tuple[LocalRows, RowTable]]] = {}  # by object: the rows to replace, and by which

    def prepare(
        self, request: RestoreRequest, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]
    ) -> PreparedShard:
        """Compare objects; if all fit, read and verify this replica's shard. Changes nothing.

        Raises:
            DataLossError: A file is damaged (the message names the file and the tensor), or an entry is not a state.
        """
        self.discard()
        differences = {name: differences_from(name, obj, modules, request) for name, obj in objects.items()}
        if any(refused(found, request.strict) for found in differences.values()):
            return PreparedShard(differences)
        for name, obj in objects.items():
            require_state(obj, request.checkpoint, request.saved[name])
        rows = {name: obj for name, obj in objects.items() if isinstance(obj, SavedRows)}
        mine = plan_reads(request.files(without=rows), self._num_replicas)[self._rank]
        try:
            tables = {name: _read_rows(request, name, obj) for name, obj in rows.items()}
            reads = [read_slices(request.checkpoint.directory, each.file, each.keys) for each in mine]
        except Exception as error:
            if isinstance(error, DataLossError) and not isinstance(error.__cause__, NotFoundError):
                raise
            return PreparedShard(differences, sees_files=False)
        self._read, self._tables = (request, reads), tables
        return PreparedShard(differences)

    def take(self, token: str, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> Callable[[], None]:
        """Exchange the values that replicas have read. All replicas call this together and see the same errors.

        One tensor after the other is exchanged. Of a tensor that is sharded here, each replica keeps its part.

        Returns:
            A function that changes the objects, without waiting for other replicas. It raises InvalidArgumentError if
            an object rejects its state: on all replicas, and nothing is changed.
        """
        read, self._read = self._read, None
        if read is None or read[0].token != token:
            raise FailedPreconditionError(
                f"raydist bug: replica {self._rank} must have read its shard before others are given it."
            )
        (request, mine), tables = read, self._tables
        plan = plan_reads(request.files(without=tables), self._num_replicas)
        targets = {name: sharded_tensors_of(obj, modules) for name, obj in objects.items() if name not in tables}
        tensors: dict[str, dict[str, torch.Tensor]] = {name: {} for name in request.saved}
        for group in _groups(plan, targets):
            found = [
                [(each, mine[each.read].pop(each.key) if rank == self._rank else each.memory()) for each in slices]
                for rank, slices in enumerate(group)
            ]
            self._exchange([[tensor for _, tensor in slices] for slices in found])
            for each, tensor in chain(*found):
                _put(tensors[each.owner], each.key, each.place, tensor)
            for owner, key in {(each.owner, each.key) for each, _ in chain(*found)}:
                # The entries of an optimizer are named by parameter and state.
                like = targets[owner].get(key, targets[owner].get(key.rpartition(".")[0]))
                tensors[owner][key] = shard_like(tensors[owner][key], like)

        def commit() -> None:
            whole = {name: obj for name, obj in objects.items() if name not in tables}
            states = {name: request.checkpoint.state_of(request.saved[name], tensors[name]) for name in whole}
            load_states(whole, states, modules, request.strict)
            for held, loaded in chain(*tables.values()):
                held.table = loaded
            self._after(objects)

        return commit

    def discard(self) -> None:
        """Drop the values that were read."""
        self._read, self._tables = None, {}


def _read_rows(request: RestoreRequest, name: str, rows: SavedRows) -> list[tuple[LocalRows, RowTable]]:
    """Read this replica's rows of each table; return them with the rows that they will replace."""
    stored = StoredRows(request.checkpoint, request.saved[name])
    stored.open()
    found = []
    for path, embedding in rows.tables().items():
        held = access_to(embedding.weight)
        if not isinstance(held, LocalRows):
            raise FailedPreconditionError("raydist bug: a replica must hold rows of the tables that it restores.")
        found.append((held, held.table.anew()))
        stored.load_into(found[-1][1], path)
    return found


@final
@dataclass(frozen=True, slots=True)
class _Slice:
    """A tensor, or a slice of one, in the planned read with this number of one replica."""

    owner: str
    key: str
    place: FilePlace
    read: int

    def memory(self) -> torch.Tensor:
        return torch.empty(self.place.slice_shape, dtype=stored_dtype(self.place.dtype))


def _groups(
    plan: Sequence[Sequence[PlannedRead]], targets: Mapping[str, Mapping[str, Any]]
) -> Iterator[list[list[_Slice]]]:
    """Yield the slices to exchange together, by rank: those of a tensor of a sharded object, or of all others.

    Replicas take turns, so that each soon frees what it has read.
    """
    groups: dict[tuple[str, str], list[list[_Slice]]] = {}
    for rank, reads in enumerate(plan):
        for number, read in enumerate(reads):
            for key, place in read.file.tensors.items():
                if key in read.keys:
                    group = (read.owner, key) if targets[read.owner] else ("", "")
                    slices = groups.setdefault(group, [[] for _ in plan])
                    slices[rank].append(_Slice(read.owner, key, place, number))
    counts: Counter[int] = Counter()
    turns = []
    for slices in groups.values():
        rank = next(rank for rank, each in enumerate(slices) if each)
        turns.append((counts[rank], slices))
        counts[rank] += 1
    yield from (slices for _, slices in sorted(turns, key=lambda each: each[0]))


def _put(tensors: dict[str, torch.Tensor], key: str, place: FilePlace, found: torch.Tensor) -> None:
    if place.rows is None:
        tensors[key] = found
        return
    if key not in tensors:
        tensors[key] = torch.empty(place.shape, dtype=found.dtype)
    tensors[key][slice(*place.rows)] = found


def _pickled_outcome(do: Callable[[], PreparedShard | None]) -> bytes:
    """Return the pickled result or error of `do`: a raised error would end the replicas' group."""
    try:
        return pickle.dumps(do())
    except Exception as error:
        return pickle.dumps(pack_error(error))


def prepare_shard(
    reader: ShardReader, request: RestoreRequest, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]
) -> bytes:
    """Prepare a restore on a replica. Replicas run this function first."""
    return _pickled_outcome(lambda: reader.prepare(request, objects, modules))


def commit_shard(
    reader: ShardReader, token: str, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]
) -> bytes:
    """Commit a restore on a replica. Replicas run this function once all have read their shards."""
    return _pickled_outcome(reader.take(token, objects, modules))


def discard_shard(reader: ShardReader) -> bytes:
    """Discard a restore on a replica. Replicas run this function if a replica reported a problem."""
    return _pickled_outcome(reader.discard)
