"""The values of a server's slices, in memory that processes of its host may read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import final

import torch

from raydist.errors import InvalidArgumentError
from raydist.parameter_servers.shared_slices import SlicesAddress, slice_views
from raydist.parameter_servers.slices import ServedSlice
from raydist.parameter_servers.slices_head import HEAD_BYTES, SlicesHead
from raydist.pipelines.engine.machine import free_memory
from raydist.shared_segment import Segment
from raydist.storage.layout import ShardLayout
from raydist.storage.shard import ShardAddress, VariableShard

__all__ = ["ServedSlices"]

_LIVES = 0


@final
class ServedSlices:
    """All slices of one server, for the server's thread. Made by :meth:`open`.

    Args:
        server: Number of the server.
        segment: Memory of the head.
        timeout_s: Time limit for readers that hold up a change.
        room: Returns the number of bytes that are left; None: unknown.
    """

    def __init__(self, server: int, segment: Segment, timeout_s: float, room: Callable[[], int | None]) -> None:
        self._server = server
        self._segment = segment
        self._head = SlicesHead(segment, server)
        self._timeout_s = timeout_s
        self._room = room
        self._shards: list[tuple[VariableShard, tuple[ServedSlice, ...]]] = []
        self._slices: dict[int, ServedSlice] = {}
        self._values: dict[int, torch.Tensor] = {}

    @staticmethod
    def open(server: int, *, timeout_s: float, room: Callable[[], int | None] = free_memory) -> ServedSlices:
        """Create a server's memory, without slices.

        Raises:
            OSError: The machine has no memory for it.
        """
        segment = Segment.create_nameless(HEAD_BYTES)
        segment.hold(_LIVES)
        return ServedSlices(server, segment, timeout_s, room)

    @property
    def version(self) -> int:
        """Number of changes of the values so far."""
        return self._head.version

    @property
    def num_bytes(self) -> int:
        """Size of all values in bytes."""
        return sum(shard.layout.num_bytes for shard, _ in self._shards)

    @property
    def address(self) -> SlicesAddress:
        """The address by which processes of this host read the values."""
        shards: tuple[tuple[ShardAddress, tuple[ServedSlice, ...]], ...]
        shards = tuple((shard.address, slices) for shard, slices in self._shards)
        return SlicesAddress(self._server, self._segment.name, self._segment.token, shards)

    def slice(self, number: int) -> ServedSlice:
        """Return the description of a slice.

        Raises:
            InvalidArgumentError: The server does not have the slice.
        """
        if number not in self._slices:
            raise InvalidArgumentError(
                f"Slices must be created before they are asked for, but parameter server {self._server} has "
                f"{len(self._slices)} of them and not number {number}. Ask the server that was planned for it."
            )
        return self._slices[number]

    def value(self, number: int) -> torch.Tensor:
        """Return a slice's values. They are written only within `changing`."""
        self.slice(number)
        return self._values[number]

    @contextlib.contextmanager
    def changing(self, *, step: int | None = None) -> Iterator[None]:
        """Lock the values for a change: readers see all of it or nothing.

        Args:
            step: Under SyncWithBackups: the step of the values after the change.

        Raises:
            DeadlineExceededError: A reader held the lock for too long; nothing was changed.
        """
        with self._head.writing(timeout_s=self._timeout_s), torch.no_grad():
            yield
            if step is not None:
                self._head.note_step(step)

    def create(self, slices: Sequence[ServedSlice], values: Sequence[torch.Tensor]) -> None:
        """Create slices; slices with known numbers are overwritten.

        Raises:
            InvalidArgumentError: Values do not fit the slices, or there is no room for them.
        """
        for each, value in zip(slices, values, strict=True):
            self._require_fitting(each, value)
        fresh = tuple(each for each in slices if each.number not in self._slices)
        if fresh:
            self._place(fresh)
        with self.changing():
            for each, value in zip(slices, values, strict=True):
                self._values[each.number].copy_(value)

    def replace(self, values: Mapping[int, torch.Tensor]) -> None:
        """Replace values by slice number: readers see all new values or none.

        Raises:
            InvalidArgumentError: A slice is unknown, or a value does not fit; nothing was changed.
        """
        for number, value in values.items():
            self._require_fitting(self.slice(number), value)
        with self.changing():
            for number, value in values.items():
                self._values[number].copy_(value)

    def drop(self, numbers: Iterable[int]) -> None:
        """Drop slices. A shard's memory is freed when all slices created together are gone, and its last reader is."""
        known = [number for number in numbers if number in self._slices]
        if not known:
            return
        with self.changing():
            for number in known:
                del self._slices[number], self._values[number]
            held = [
                (shard, slices, any(each.number in self._slices for each in slices)) for shard, slices in self._shards
            ]
            self._shards = [(shard, slices) for shard, slices, is_used in held if is_used]
        for shard, _, is_used in held:
            if not is_used:
                shard.close()

    def _place(self, slices: tuple[ServedSlice, ...]) -> None:
        sizes = [each.num_bytes for each in slices]
        self._require_room(ShardLayout.of(sizes).num_bytes)
        shard = VariableShard.create_nameless(sizes)
        self._shards.append((shard, slices))
        self._values |= slice_views(shard, slices)
        self._slices |= {each.number: each for each in slices}

    def _require_fitting(self, wanted: ServedSlice, value: torch.Tensor) -> None:
        if tuple(value.shape) != wanted.shape or value.dtype != wanted.dtype:
            raise InvalidArgumentError(
                f"Values of {wanted.name} must be {wanted.dtype} of shape {wanted.shape}, got {value.dtype} of shape "
                f"{tuple(value.shape)}. Give the slice's own rows."
            )
        known = self._slices.get(wanted.number)
        if known is not None and (known.shape, known.dtype) != (wanted.shape, wanted.dtype):
            raise InvalidArgumentError(
                f"Slice {wanted.number} must stay {known.dtype} of shape {known.shape}, as it was created for "
                f"{known.name}, got {wanted.dtype} of shape {wanted.shape} for {wanted.name}. Use a new number."
            )

    def _require_room(self, needed: int) -> None:
        room = self._room()
        if room is not None and needed > room:
            raise InvalidArgumentError(
                f"Variables must fit into the memory of their servers, but parameter server {self._server} is to hold "
                f"{needed:,} bytes more and has {room:,} free: {needed - room:,} too few. Use more servers (num_ps, on "
                "other machines), give them more memory, or use a partitioner that splits large variables."
            )

    def close(self) -> None:
        """Release all memory, which is freed with its last reader. May be called twice."""
        self._head.close()
        for shard, _ in self._shards:
            shard.close()
