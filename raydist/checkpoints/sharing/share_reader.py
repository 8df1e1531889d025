"""A replica's half of a restore: read and verify a share of the files, exchange the shares, change the objects.

Nothing is changed before every replica holds all values and no replica waits for another one any more.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, final

import torch
from torch import nn

from raydist.actors.portable_errors import pack_error
from raydist.checkpoints.dtypes import stored_dtype
from raydist.checkpoints.read_tensors import read_slices
from raydist.checkpoints.restoring.compared_objects import differences_of, refused
from raydist.checkpoints.restoring.given_states import GivenStates
from raydist.checkpoints.sharing.restore_request import PreparedShare, RestoreRequest
from raydist.checkpoints.tensor_file import FilePlace, TensorFile
from raydist.errors import DataLossError, FailedPreconditionError, NotFoundError

__all__ = ["ShareReader", "TakenStates", "commit_share", "discard_share", "plan_reads", "prepare_share"]


@final
@dataclass(frozen=True, slots=True)
class PlannedRead:
    """The tensors that one replica reads from one file.

    Attributes:
        owner: Name of the object that the tensors belong to.
        file: The file.
        keys: Names of the tensors, or of the tensors of which the file has rows; empty for an index file.
    """

    owner: str
    file: TensorFile
    keys: tuple[str, ...]


def plan_reads(files: Mapping[str, Sequence[TensorFile]], num_replicas: int) -> list[list[PlannedRead]]:
    """Return the reads of each replica, by rank: contiguous stretches of files.

    One replica reads all of a tensor or slice, because its checksum covers all of it.

    Args:
        files: Files of each object.
        num_replicas: Number of replicas that read.

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
@dataclass(frozen=True, slots=True)
class _ReadShare:
    """The values that a replica has read: tensors or slices by name, for each planned read."""

    request: RestoreRequest
    reads: Sequence[Mapping[str, torch.Tensor]]


@final
@dataclass(frozen=True, slots=True)
class TakenStates:
    """The values that all replicas have read: tensors by name of the object."""

    request: RestoreRequest
    tensors: Mapping[str, Mapping[str, torch.Tensor]]

    def state(self, name: str) -> Any:
        """Return the state of an object."""
        return self.request.checkpoint.state_of(self.request.saved[name], self.tensors[name])


@final
class ShareReader:
    """The restores of one replica, which reads a share of each. Used by the replica's thread.

    Args:
        rank: Rank of the replica.
        num_replicas: Number of replicas.
        exchange: Fills tensors with the values that other replicas have read; see `ByteExchange.share`.
        after: Called with the objects that were given the same states on all replicas.
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
        self._read: _ReadShare | None = None

    def prepare(
        self, request: RestoreRequest, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]
    ) -> PreparedShare:
        """Compare objects; if all fit, read and verify this replica's share. Changes nothing.

        Args:
            request: The restore.
            objects: The objects to restore, as they are on this replica.
            modules: Modules that name the parameters of optimizers.

        Raises:
            DataLossError: A file is damaged (the message names the file and the tensor), or an entry is not a state.
        """
        self._read = None
        differences = {
            name: tuple(differences_of(name, obj, modules, request.checkpoint, request.saved[name]))
            for name, obj in objects.items()
        }
        if any(refused(found, request.strict) for found in differences.values()):
            return PreparedShare(differences)
        for saved in request.saved.values():
            request.checkpoint.require_state(saved)
        mine = plan_reads(request.files(), self._num_replicas)[self._rank]
        try:
            reads = [read_slices(request.checkpoint.directory, each.file, each.keys) for each in mine]
        except Exception as error:
            if isinstance(error, DataLossError) and not isinstance(error.__cause__, NotFoundError):
                raise
            return PreparedShare(differences, sees_files=False)
        self._read = _ReadShare(request, reads)
        return PreparedShare(differences)

    def take(self, token: str) -> TakenStates:
        """Return the values that all replicas have read. All replicas call this together and see the same errors."""
        read, self._read = self._read, None
        if read is None or read.request.token != token:
            raise FailedPreconditionError(
                f"raydist bug: replica {self._rank} must have read its share before others are given it."
            )
        plan = plan_reads(read.request.files(), self._num_replicas)
        shares = [[_memory(each) for each in reads] for reads in plan]
        shares[self._rank] = [dict(each) for each in read.reads]
        self._exchange([[tensor for each in share for tensor in each.values()] for share in shares])
        tensors: dict[str, dict[str, torch.Tensor]] = {name: {} for name in read.request.saved}
        for planned, found in zip(chain(*plan), chain(*shares), strict=True):
            for key, tensor in found.items():
                _put(tensors[planned.owner], key, planned.file.tensors[key], tensor)
        return TakenStates(read.request, tensors)

    def commit(self, taken: TakenStates, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
        """Change the objects. Does not wait for other replicas.

        Raises:
            InvalidArgumentError: An object rejects its state. This happens on all replicas; nothing is changed.
        """
        GivenStates(objects, modules, taken.request.strict).give({name: taken.state(name) for name in objects})
        self._after(objects)

    def discard(self) -> None:
        """Drop the values that were read."""
        self._read = None


def _memory(read: PlannedRead) -> dict[str, torch.Tensor]:
    places = {key: place for key, place in read.file.tensors.items() if key in read.keys}
    return {key: torch.empty(place.slice_shape, dtype=stored_dtype(place.dtype)) for key, place in places.items()}


def _put(tensors: dict[str, torch.Tensor], key: str, place: FilePlace, found: torch.Tensor) -> None:
    if place.rows is None:
        tensors[key] = found
        return
    if key not in tensors:
        tensors[key] = torch.empty(place.shape, dtype=found.dtype)
    tensors[key][slice(*place.rows)] = found


def _told(do: Callable[[], PreparedShare | None]) -> bytes:
    """Return the pickled result or error of `do`: a raised error would end the replicas' group."""
    try:
        return pickle.dumps(do())
    except Exception as error:
        return pickle.dumps(pack_error(error))


def prepare_share(
    reader: ShareReader, request: RestoreRequest, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]
) -> bytes:
    """Prepare a restore on a replica. Replicas run this function first."""
    return _told(lambda: reader.prepare(request, objects, modules))


def commit_share(
    reader: ShareReader, token: str, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]
) -> bytes:
    """Commit a restore on a replica. Replicas run this function once all have read their shares."""
    taken = reader.take(token)
    return _told(lambda: reader.commit(taken, objects, modules))


def discard_share(reader: ShareReader) -> bytes:
    """Discard a restore on a replica. Replicas run this function if a replica reported a problem."""
    return _told(reader.discard)
