"""A pool of memory buffers that this process shares with one input worker, which writes results into them.

A buffer is a memfd. The worker opens the buffer through /proc, which works only on the same machine, and checks the
token in its first bytes. A buffer returns to the pool when the last array in it is gone, and the next result reuses its
pages. A buffer that a forked child may see as well is never written again.
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
HEADER_BYTES = 64  # the token, padded to a cache line
_TOKEN_BYTES = 16
_BUFFER_BYTES = 64 << 20  # only written pages take memory
MOST_BUFFERS = 10  # of one worker; a result without a free buffer is sent by the object store

_Array = np.ndarray[Any, np.dtype[np.uint8]]


@final
@dataclass(frozen=True, slots=True)
class BufferAddress:
    """The address by which another process of this machine opens a buffer.

    Attributes:
        pid: Process that made the buffer.
        fd: File descriptor of the buffer in that process.
        token: First bytes of the buffer.
        num_bytes: Size of the buffer.
    """

    pid: int
    fd: int
    token: bytes
    num_bytes: int


@final
class SharedBuffer:
    """A mapped memfd. It is closed and its memory freed when this object and all arrays in it are gone.

    Args:
        fd: File descriptor; closed with this object.
        memory: Mapping of the whole file.
        token: First bytes of the file.
    """

    def __init__(self, fd: int, memory: mmap.mmap, token: bytes) -> None:
        self.memory = memory
        self.address = BufferAddress(os.getpid(), fd, token, len(memory))
        weakref.finalize(self, os.close, fd).atexit = False

    @classmethod
    def create(cls, num_bytes: int = _BUFFER_BYTES) -> Self:
        """Create a buffer. Raises OSError if the system has no memfd, or too many files are open."""
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
    """A buffer lent for one block's result. Returns to the pool with this object, or once opened, with the arrays."""

    def __init__(self, buffer: SharedBuffer, give_back: Callable[[SharedBuffer], None]) -> None:
        self._buffer = buffer
        self._finalizer = weakref.finalize(self, give_back, buffer)
        self._finalizer.atexit = False
        self._give_back = give_back

    @property
    def address(self) -> BufferAddress:
        """The address by which a worker opens the buffer."""
        return self._buffer.address

    def open(self) -> _Array:
        """Return the buffer's memory, writable; the buffer returns to the pool with the last array. Call it once."""
        memory = np.frombuffer(self._buffer.memory, np.uint8)
        if self._finalizer.detach() is None:
            raise AssertionError(f"raydist bug: buffer {self.address} of a result was opened twice.")
        weakref.finalize(memory, self._give_back, self._buffer).atexit = False
        return memory


@final
class BufferShelf:
    """The buffer pool of one worker. Thread-safe.

    A buffer may return to the pool while its block, whose result nobody fetched, still runs. The worker runs blocks in
    order, so this block has ended before the worker writes the next result into the buffer.
    """

    def __init__(self, most: int = MOST_BUFFERS) -> None:
        self._most = most
        self._made = 0
        self._idle: list[SharedBuffer] = []
        self._lent: dict[bytes, None] = {}
        os.register_at_fork(after_in_parent=_weakly(self._give_up_lent))

    def lease(self) -> BufferLease | None:
        """Lend the buffer that was used last, whose memory is warm, or a new one; None if all are in use."""
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
            self._made -= 1  # a forked child may see this buffer
            return
        del self._lent[token]
        self._idle.append(buffer)

    def _give_up_lent(self) -> None:
        """Never reuse the buffers that are lent at a fork: the child sees them and must not see changes."""
        self._lent.clear()


def _weakly(method: Any) -> Callable[..., None]:
    """Return a function that calls a bound method while its object lives, without keeping the object alive."""
    found = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        living = found()
        if living is not None:
            living(*args)

    return call
