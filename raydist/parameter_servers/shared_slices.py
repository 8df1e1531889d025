"""A server's slices in shared memory, which other processes of the host read without a request to the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from raydist.compat.torch_internals import foreach_copy
from raydist.errors import InvalidArgumentError, UnavailableError
from raydist.parameter_servers.slices import ServedSlice
from raydist.parameter_servers.slices_head import HEAD_BYTES, SlicesHead
from raydist.shared_segment import Segment
from raydist.storage.shard import ShardAddress, VariableShard

__all__ = ["SharedSlices", "SlicesAddress", "slice_views"]


@final
@dataclass(frozen=True, slots=True)
class SlicesAddress:
    """The address of a server's slices for processes of its host. The answer to `LocateSlices`.

    Attributes:
        server: Number of the server.
        head: Name of the head's shared memory segment.
        token: First bytes of this segment.
        shards: Addresses of values: slices that were created together share a shard, in this order.
    """

    server: int
    head: str
    token: bytes
    shards: tuple[tuple[ShardAddress, tuple[ServedSlice, ...]], ...]


@final
class SharedSlices:
    """A reader of a server's slices. Made by :meth:`open`; threads may share it.

    It does not have slices that the server got later: ask for the address again (`slices` lists the known ones).

    Args:
        head: Version and lock.
        shards: The opened shards.
        views: A read-only view of each slice's values, by number.
    """

    def __init__(self, head: SlicesHead, shards: Sequence[VariableShard], views: Mapping[int, torch.Tensor]) -> None:
        self._head = head
        self._shards = shards
        self._views = views

    @staticmethod
    def open(address: SlicesAddress) -> SharedSlices:
        """Open a server's slices in this process.

        Raises:
            UnavailableError: This process cannot open them (another host or container): pull instead.
        """
        try:
            segment = Segment.open(address.head, HEAD_BYTES, address.token)
        except OSError as error:
            raise UnavailableError(
                f"Values of parameter server {address.server} must be seen in its host's memory to be read there, but "
                f"{address.head} cannot be opened: {error.strerror or error}. Pull them from the server instead."
            ) from error
        shards = [VariableShard.open(shard) for shard, _ in address.shards]
        views: dict[int, torch.Tensor] = {}
        for shard, (_, slices) in zip(shards, address.shards, strict=True):
            views |= slice_views(shard, slices)
        return SharedSlices(SlicesHead(segment, address.server), shards, views)

    @property
    def slices(self) -> frozenset[int]:
        """Numbers of the slices that this object can read."""
        return frozenset(self._views)

    @property
    def version(self) -> int:
        """Number of changes of the server's values so far. Takes no lock."""
        return self._head.version

    @property
    def step(self) -> int:
        """SyncWithBackups: the step of the values. Takes no lock."""
        return self._head.step

    def read_into(
        self, tensors: Mapping[int, torch.Tensor], *, unless_version: int = -1, timeout_s: float
    ) -> int | None:
        """Copy present values, all of one version: never half of one update and half of another.

        Args:
            tensors: Targets by slice number, written in place: of the slice's shape, on any device, strided in any
                way, parameters too (autograd records nothing, their `_version` rises).
            unless_version: If the server still has this version, nothing is copied.
            timeout_s: Time limit for the lock.

        Returns:
            The version; None if it is `unless_version`.

        Raises:
            InvalidArgumentError: A slice is not among `slices`.
            DeadlineExceededError: The lock was not free in time. Nothing was copied.
            UnavailableError: The server's process is gone.
        """
        if self._head.version == unless_version:
            return None
        try:
            sources = [self._views[number] for number in tensors]
        except KeyError as error:
            raise InvalidArgumentError(
                f"Slices to be read must be among {len(self._views)} known ones, got {error}. Ask the server where its "
                "slices are again: it has got some since."
            ) from None
        with self._head.reading(timeout_s=timeout_s) as version, torch.no_grad():
            if version == unless_version:
                return None
            if sources:
                foreach_copy(list(tensors.values()), sources)
        return version

    def pin(self) -> None:
        """Pin the values' memory, so that GPUs copy from it directly. May be called twice."""
        for shard in self._shards:
            shard.pin()

    def close(self) -> None:
        """Release all resources. May be called twice."""
        self._head.close()
        for shard in self._shards:
            shard.close()


def slice_views(shard: VariableShard, slices: Sequence[ServedSlice]) -> dict[int, torch.Tensor]:
    """Return a view of each slice's values in a shard, by number."""
    return {each.number: shard.shared(index).view(each.dtype).view(each.shape) for index, each in enumerate(slices)}
