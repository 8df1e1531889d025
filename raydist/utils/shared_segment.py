"""A file in memory that the ranks of a group map, and file locks that show which ranks are alive.

The file has no name. Other processes of the same user open the file through /proc of the process that created it. The
kernel frees the file with the last process that has it open or mapped.

Each rank locks one byte of the file through its own descriptor (an open file description lock). The kernel releases the
lock when the process ends in any way. Locks are visible across containers, and to ranks that are threads of a process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import struct
import weakref
from typing import final

import torch

from raydist.core.machine import free_memory

TOKEN_BYTES = 32
# struct flock: type, whence, start, length, pid (0 for locks of a descriptor).
_FLOCK = "@hhqqi4x"


@final
class Segment:
    """One rank's mapping of the file. One rank calls :meth:`create_nameless`, the others :meth:`open`.

    Attributes:
        name: Path by which other processes open the file.
        token: First bytes of the file, which prove that two ranks map the same file.
        size: Length of the file in bytes.
        memory: The whole file as a tensor of bytes.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        # The mapping needs no descriptor. The locks have their own, because closing a descriptor releases its locks.
        descriptor = os.open(name, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != size:
                raise OSError(f"{name} has {os.fstat(descriptor).st_size} bytes and should have {size}")
            try:
                storage = torch.UntypedStorage.from_file(_path_of(descriptor), shared=True, nbytes=size)
            except RuntimeError as error:
                raise OSError(errno.ENOMEM, f"{size:,} bytes cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)
        self.memory = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]  # torch's stubs: any storage
        self._buffer: memoryview = self.memory.numpy().data
        self.token = bytes(self.bytes()[:TOKEN_BYTES])
        self._descriptor: int | None = os.open(name, os.O_RDWR | os.O_CLOEXEC)
        _open_segments.add(self)

    @staticmethod
    def create_nameless(size: int) -> Segment:
        """Create a file and allocate all of its memory. The size of `/dev/shm` does not limit the file.

        Raises:
            OSError: There is no room for the file.
        """
        _require_room(size)
        descriptor = os.memfd_create("raydist-shm-nameless", os.MFD_CLOEXEC)
        try:
            # If memory ran out, a write to an unallocated page would end the process with SIGBUS.
            os.posix_fallocate(descriptor, 0, size)
            os.pwrite(descriptor, secrets.token_bytes(TOKEN_BYTES), 0)
            segment = Segment(_path_of(descriptor), size)
            segment.name = _path_of(segment._open_descriptor())
            return segment
        finally:
            os.close(descriptor)

    @staticmethod
    def open(name: str, size: int, token: bytes) -> Segment:
        """Open the file that another rank created, by its name.

        Raises:
            OSError: The file does not exist, or is another file.
        """
        segment = Segment(name, size)
        if segment.token != token:
            segment.close()
            raise OSError(f"{name} is a file of somebody else")
        return segment

    @staticmethod
    def accept(offer: bytes, size: int) -> Segment:
        """Open the file of another rank's :meth:`offer`.

        Raises:
            OSError: The file does not exist here, or is another file.
        """
        return Segment.open(offer[TOKEN_BYTES:].decode(), size, offer[:TOKEN_BYTES])

    def offer(self) -> bytes:
        """Return the token and the name, for other ranks."""
        return self.token + self.name.encode()

    @property
    def address(self) -> int:
        return self.memory.data_ptr()

    def bytes(self) -> memoryview:
        return self._buffer

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor in the segment. The tensor keeps the segment mapped."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        # Not a view of `memory`: autograd refuses some operations on views, and adding sparse tensors to a view with an
        # offset writes elsewhere (torch 2.13).
        return torch.frombuffer(self._buffer, dtype=dtype, count=numel, offset=offset)

    def hold(self, rank: int) -> None:
        """Show that `rank` is alive, until the segment is closed or the process ends."""
        fcntl.fcntl(self._open_descriptor(), fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, rank + 1, 1))

    def holds(self, rank: int) -> bool:
        """Return True if another mapping of the segment shows that `rank` is alive."""
        answer = fcntl.fcntl(self._open_descriptor(), fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, rank + 1, 1))
        kind: int = struct.unpack(_FLOCK, answer)[0]
        return kind != fcntl.F_UNLCK

    def close(self) -> None:
        """Release the locks. The last tensor in the segment frees the memory. May be called twice."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        # A mapping that is dropped without `close` would leak a descriptor.
        with contextlib.suppress(AttributeError, OSError, TypeError):  # half initialised, or the interpreter is ending
            self.close()

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise OSError(f"{self.name} is closed")
        return self._descriptor


def _require_room(size: int) -> None:
    """Raise OSError if memory is short: without this check the kernel might kill processes instead."""
    left = free_memory()
    if left is not None and size > left:
        raise OSError(errno.ENOSPC, f"{size:,} bytes are wanted, {left:,} are left of the machine's memory")


def _path_of(descriptor: int) -> str:
    """Return the path by which other processes of this host and user open a descriptor of this process."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _flock(kind: int, start: int, length: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, start, length, 0)


_open_segments: weakref.WeakSet[Segment] = weakref.WeakSet()


def _close_all() -> None:
    """Close the segments in a forked child, whose descriptors would keep the locks of a dead parent."""
    for segment in list(_open_segments):
        segment.close()


os.register_at_fork(after_in_child=_close_all)
