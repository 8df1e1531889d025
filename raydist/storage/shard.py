"""One copy of some variables in a host's memory, which several processes map.

Each process sees it twice. The *shared* view is the copy itself. The *own* view shows the same pages and costs no
memory, until the process writes there: then it has the written pages for itself, and gives them up by `drop_own`. So
readers map the variables and cannot harm them, and whoever owns the shard writes them in place, once.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch

from raydist.errors import DeadlineExceededError, UnavailableError
from raydist.shared_segment import DIRECTORY, TOKEN_BYTES, Segment, remove_leftovers
from raydist.storage.layout import FIRST_BYTE, ShardLayout
from raydist.storage.pages import PAGE_BYTES, written_ranges

__all__ = ["ShardAddress", "VariableShard"]

_VERSION_AT = TOKEN_BYTES  # an int64; even: nobody writes
_CHUNK = 1 << 20  # bytes that are compared at once where the kernel does not tell what was written
_POLL_S = 0.0005


@final
@dataclass(frozen=True, slots=True)
class ShardAddress:
    """By what another process of the host finds a shard, as long as its file has its name.

    Attributes:
        name: Of the file, as `Segment.name`.
        token: Its first bytes.
        sizes: Of the variables, in bytes.
    """

    name: str
    token: bytes
    sizes: tuple[int, ...]


@final
class VariableShard:
    """One process's end of a shard. Made by :meth:`create` once, and by :meth:`open` in the other processes.

    Attributes:
        layout: Where the variables lie.
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
        self._head = segment.view(_VERSION_AT, 1, torch.int64)

    @staticmethod
    def create(sizes: Sequence[int]) -> VariableShard:
        """A new shard for variables of these sizes, all zero. :meth:`unlink` it when the others have opened it.

        Raises:
            UnavailableError: There is no room for it.
        """
        layout = ShardLayout.of(sizes)
        try:
            remove_leftovers()
            segment = Segment.create(layout.num_bytes)
            segment.hold(0)
            return VariableShard(segment, layout)
        except OSError as error:
            raise UnavailableError(
                f"Variables of {layout.num_bytes:,} bytes must fit into the host's shared memory, but {DIRECTORY} gave "
                f"none: {error.strerror or error}. Make it larger (docker run --shm-size), or use MirroredStrategy."
            ) from error

    @staticmethod
    def create_nameless(sizes: Sequence[int]) -> VariableShard:
        """A new shard for variables of these sizes, all zero, which others may open as long as this process has it.

        Raises:
            UnavailableError: There is no memory for it.
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
        """The shard that another process has created.

        Raises:
            UnavailableError: It cannot be seen from here.
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
        """By what others open it."""
        return ShardAddress(self._segment.name, self._segment.token, self.layout.sizes)

    @property
    def version(self) -> int:
        """How often it was written so far, twice; odd while somebody writes."""
        return int(self._head.item())

    def shared(self, number: int) -> torch.Tensor:
        """The bytes of one variable; what is written there all processes see."""
        return self._segment.view(self.layout.offsets[number], self.layout.sizes[number], torch.uint8)

    def own(self, number: int) -> torch.Tensor:
        """The same bytes; what is written there only this process sees, until it drops it."""
        size = self.layout.sizes[number]
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._own, dtype=torch.uint8, count=size, offset=self.layout.offsets[number])

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Around writes to `shared`, by one process at a time: the version tells others."""
        self._head += 1
        try:
            yield
        finally:
            self._head += 1

    def snapshot(self, *, timeout_s: float) -> tuple[int, list[torch.Tensor]]:
        """A version and copies of all variables as they were then: never half of one update and half of another.

        Raises:
            DeadlineExceededError: It was written all the time, for `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            before = self.version
            if before % 2 == 0:
                copies = [self.shared(number).clone() for number in range(len(self.layout.sizes))]
                if self.version == before:
                    return before, copies
            time.sleep(_POLL_S)
        raise DeadlineExceededError(
            f"Shared variables must rest for as long as it takes to copy them, but were written again and again for "
            f"{timeout_s:g} s. Write less often, or wait longer."
        )

    def own_ranges(self) -> list[tuple[int, int]]:
        """Where this process has pages for itself: (begin, end) in bytes of the file."""
        told = written_ranges(self._own_address, self.layout.num_bytes)
        return self._differing_ranges() if told is None else told

    def _differing_ranges(self) -> list[tuple[int, int]]:
        own, shared, end = memoryview(self._own), self._segment.bytes(), self.layout.num_bytes
        begins = range(FIRST_BYTE, end, _CHUNK)
        chunks = [(begin, min(begin + _CHUNK, end)) for begin in begins]
        return [(begin, stop) for begin, stop in chunks if own[begin:stop] != shared[begin:stop]]

    def publish_own(self) -> None:
        """Make what this process has for itself the variables' values, and drop it."""
        own, shared = memoryview(self._own), self._segment.bytes()
        with self.writing():
            for begin, end in self.own_ranges():
                shared[max(begin, FIRST_BYTE) : end] = own[max(begin, FIRST_BYTE) : end]
        self.drop_own()

    def drop_own(self) -> None:
        """Give up what this process has for itself: `own` shows the shared values again."""
        for begin, end in self.own_ranges():
            first = begin // PAGE_BYTES * PAGE_BYTES
            self._own.madvise(mmap.MADV_DONTNEED, first, min(end, self.layout.num_bytes) - first)

    def pin(self) -> None:
        """Let GPUs copy from the shared view, and to it, without a detour. May be called twice."""
        if not self._pinned:
            self._pinned = True
            address, num_bytes = self._segment.address, self.layout.num_bytes
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))

    def unlink(self) -> None:
        """Remove the file's name: nobody can open it any more, and it goes with its last user. May be called twice."""
        self._segment.unlink()

    def close(self) -> None:
        """Stop showing that this process uses it. The memory goes with the last tensor. May be called twice."""
        if self._pinned:
            self._pinned = False
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._segment.address))
        self._segment.close()
