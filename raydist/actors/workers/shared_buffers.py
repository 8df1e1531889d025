"""Memory that this process shares with one input worker: results are written into it, and handed out where they lie.

A buffer is a file without a name. The worker opens it through /proc, where it finds it only on the same machine, and
knows it by its first bytes. It goes back to its shelf when the last array in it is gone, so that its pages are there
already when the next result is written. What a user holds is never written again: a buffer that a forked child may see
as well is given up.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np

__all__ = ["BUFFER_NAME", "HEADER_BYTES", "MOST_BUFFERS", "BufferAddress", "BufferLease", "BufferShelf", "SharedBuffer"]

BUFFER_NAME = "raydist-results"
HEADER_BYTES = 64  # the token, and room up to a cache line
_TOKEN_BYTES = 16
_BUFFER_BYTES = 64 << 20  # of these only what is written takes memory
MOST_BUFFERS = 10  # of one worker; a result that finds none free travels through the object store

_Array = np.ndarray[Any, np.dtype[np.uint8]]


@final
@dataclass(frozen=True, slots=True)
class BufferAddress:
    """How another process of this machine finds a buffer.

    Attributes:
        pid: The process that made it.
        fd: Its file there.
        token: Its first bytes.
        num_bytes: Its size.
    """

    pid: int
    fd: int
    token: bytes
    num_bytes: int


@final
class SharedBuffer:
    """One file without a name, mapped. It is closed, and its memory freed, when nobody refers to it or its arrays.

    Args:
        fd: The file; closed with this object.
        memory: The mapping of all of it.
        token: Its first bytes.
    """

    def __init__(self, fd: int, memory: mmap.mmap, token: bytes) -> None:
        self.memory = memory
        self.address = BufferAddress(os.getpid(), fd, token, len(memory))
        weakref.finalize(self, os.close, fd).atexit = False

    @classmethod
    def create(cls, num_bytes: int = _BUFFER_BYTES) -> Self:
        """A new one. OSError where the system has no such files, or too many are open."""
        if not hasattr(os, "memfd_create"):
            raise OSError(f"Files without a name must be known to the system, got {sys.platform}. Do without them.")
        fd = os.memfd_create(BUFFER_NAME, os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, num_bytes)
            memory = mmap.mmap(fd, num_bytes)
        except BaseException:
            os.close(fd)
            raise
        token = secrets.token_bytes(_TOKEN_BYTES)
        memory[:_TOKEN_BYTES] = token
        return cls(fd, memory, token)


@final
class BufferLease:
    """A buffer for the result of one block: goes back when that was not fetched, else with the last of its arrays."""

    def __init__(self, buffer: SharedBuffer, give_back: Callable[[SharedBuffer], None]) -> None:
        self._buffer = buffer
        self._finalizer = weakref.finalize(self, give_back, buffer)
        self._finalizer.atexit = False
        self._give_back = give_back

    @property
    def address(self) -> BufferAddress:
        """Where a worker finds it."""
        return self._buffer.address

    def open(self) -> _Array:
        """All of its memory, writable. The buffer goes back when the last array over it is gone. To be called once."""
        memory = np.frombuffer(self._buffer.memory, np.uint8)
        if self._finalizer.detach() is None:
            raise AssertionError(f"raydist bug: buffer {self.address} of a result was opened twice.")
        weakref.finalize(memory, self._give_back, self._buffer).atexit = False
        return memory


@final
class BufferShelf:
    """The buffers of one worker. Any thread may lease one.

    A buffer that comes back from a block whose result nobody fetched may still be written by it; the worker does its
    blocks in order, so it has finished with that before it writes the next result into the buffer.
    """

    def __init__(self, most: int = MOST_BUFFERS) -> None:
        self._most = most
        self._made = 0
        self._idle: list[SharedBuffer] = []
        self._lent: dict[bytes, None] = {}
        os.register_at_fork(after_in_parent=_weakly(self._give_up_lent))

    def lease(self) -> BufferLease | None:
        """The buffer that was used last, whose memory is warm, or a new one; None when all are in use."""
        buffer = self._take()
        if buffer is None:
            return None
        self._lent[buffer.address.token] = None
        return BufferLease(buffer, _weakly(self._put_back))

    def _take(self) -> SharedBuffer | None:
        try:
            return self._idle.pop()
        except IndexError:
            if self._made >= self._most:
                return None
        self._made += 1
        try:
            return SharedBuffer.create()
        except OSError:
            self._most = self._made = self._made - 1
            return None

    def _put_back(self, buffer: SharedBuffer) -> None:
        token = buffer.address.token
        if token not in self._lent:
            self._made -= 1  # a child of this process may see it
            return
        del self._lent[token]
        self._idle.append(buffer)

    def _give_up_lent(self) -> None:
        """This process has forked: the child sees what is lent now, and must not see it change."""
        self._lent.clear()


def _weakly(method: Any) -> Callable[..., None]:
    """`method` as long as its object lives: what outlives a shelf must not keep its memory."""
    found = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        living = found()
        if living is not None:
            living(*args)

    return call
