"""One copy of some variables in a host's shared memory, mapped by several processes.

Each process maps the memory twice. The *shared* view is the copy itself. The *own* view is a private (copy-on-write)
mapping: it shows the same pages and costs no memory until the process writes there; `drop_own` drops the written pages.
Readers therefore cannot change the variables for others, and the owner of the shard writes them once, in place.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from raydist.errors import UnavailableError
from raydist.shared_segment import DIRECTORY, Segment
from raydist.storage.layout import FIRST_BYTE, ShardLayout
from raydist.storage.pages import PAGE_BYTES, written_ranges

__all__ = ["ShardAddress", "VariableShard"]

_CHUNK = 1 << 20  # bytes compared at once if the kernel cannot list the written pages


@final
@dataclass(frozen=True, slots=True)
class ShardAddress:
    """The address by which another process of the host opens a shard, while the creator holds it.

    Attributes:
        name: Name of the file, as `Segment.name`.
        token: First bytes of the file.
        sizes: Sizes of the variables in bytes.
    """

    name: str
    token: bytes
    sizes: tuple[int, ...]


@final
class VariableShard:
    """The mapping of a shard in one process, made by :meth:`create_nameless` in one and by :meth:`open` in all others.

    Attributes:
        layout: Offsets of the variables.
    """

    def __init__(self, segment: Segment, layout: ShardLayout) -> None:
        self.layout = layout
        self._segment = segment
        descriptor = os.open(DIRECTORY / segment.name, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._own = mmap.mmap(descriptor, layout.num_bytes, flags=mmap.MAP_PRIVATE)
        finally:
            os.close(descriptor)
        self._own_address = torch.frombuffer(self._own, dtype=torch.uint8).data_ptr()
        self._pinned = False

    @staticmethod
    def create_nameless(sizes: Sequence[int]) -> VariableShard:
        """Create a shard for variables of these sizes, all zero; others may open it while this process holds it.

        Raises:
            UnavailableError: The host has not enough memory.
        """
        layout = ShardLayout.of(sizes)
        try:
            segment = Segment.create_nameless(layout.num_bytes)
            segment.hold(0)
            return VariableShard(segment, layout)
        except OSError as error:
            raise UnavailableError(
                f"Variables of {layout.num_bytes:,} bytes must fit into the host's memory, which gave none: "
                f"{error.strerror or error}. Give it more memory, or spread the variables over more hosts."
            ) from error

    @staticmethod
    def open(address: ShardAddress) -> VariableShard:
        """Open the shard that another process has created.

        Raises:
            UnavailableError: This process cannot open the file.
        """
        layout = ShardLayout.of(address.sizes)
        try:
            return VariableShard(Segment.open(address.name, layout.num_bytes, address.token), layout)
        except OSError as error:
            raise UnavailableError(
                f"Processes that share variables must see one {DIRECTORY}, but {address.name} there cannot be opened: "
                f"{error.strerror or error}. Let their containers share it (--ipc=host), or use MirroredStrategy."
            ) from error

    @property
    def address(self) -> ShardAddress:
        """The address by which other processes open the shard."""
        return ShardAddress(self._segment.name, self._segment.token, self.layout.sizes)

    def shared(self, number: int) -> torch.Tensor:
        """Return the bytes of one variable; all processes see writes to them."""
        return self._segment.view(self.layout.offsets[number], self.layout.sizes[number], torch.uint8)

    def own(self, number: int) -> torch.Tensor:
        """Return the same bytes in the private view; only this process sees writes to them, until :meth:`drop_own`."""
        size = self.layout.sizes[number]
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._own, dtype=torch.uint8, count=size, offset=self.layout.offsets[number])

    def own_ranges(self) -> list[tuple[int, int]]:
        """Return the ranges with private pages of this process: (begin, end) in bytes of the file."""
        told = written_ranges(self._own_address, self.layout.num_bytes)
        return self._differing_ranges() if told is None else told

    def _differing_ranges(self) -> list[tuple[int, int]]:
        own, shared, end = memoryview(self._own), self._segment.bytes(), self.layout.num_bytes
        begins = range(FIRST_BYTE, end, _CHUNK)
        chunks = [(begin, min(begin + _CHUNK, end)) for begin in begins]
        return [(begin, stop) for begin, stop in chunks if own[begin:stop] != shared[begin:stop]]

    def publish_own(self) -> None:
        """Copy this process's private pages to the shared copy, and drop them."""
        own, shared = memoryview(self._own), self._segment.bytes()
        for begin, end in self.own_ranges():
            shared[max(begin, FIRST_BYTE) : end] = own[max(begin, FIRST_BYTE) : end]
        self.drop_own()

    def drop_own(self) -> None:
        """Drop this process's private pages: `own` shows the shared values again."""
        for begin, end in self.own_ranges():
            first = begin // PAGE_BYTES * PAGE_BYTES
            self._own.madvise(mmap.MADV_DONTNEED, first, min(end, self.layout.num_bytes) - first)

    def pin(self) -> None:
        """Pin the shared view's memory for direct copies from and to GPUs. Idempotent."""
        if not self._pinned:
            self._pinned = True
            address, num_bytes = self._segment.address, self.layout.num_bytes
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))

    def close(self) -> None:
        """Release this process's hold on the shard. The last tensor that uses the memory frees it. Idempotent."""
        if self._pinned:
            self._pinned = False
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._segment.address))
        self._segment.close()
