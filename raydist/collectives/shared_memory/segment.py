"""A file in `/dev/shm` that the ranks of a group have mapped, and the locks by which they see each other live.

Each rank holds a lock on its own byte of the file through a descriptor of its own (an open file description lock). The
kernel lets go of it when the process ends, however it ends, and shows it to whoever asks: across containers, and for
ranks that are threads of one process.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import struct
import time
import weakref
from pathlib import Path
from typing import final

import torch

__all__ = ["DIRECTORY", "TOKEN_BYTES", "Segment", "remove_leftovers"]

DIRECTORY = Path("/dev/shm")  # noqa: S108  # files there have random names, and are for their owner alone
_PREFIX = "raydist-shm-"
TOKEN_BYTES = 32
_LEFTOVER_S = 60.0
# struct flock: type, whence, start, length, pid (0 for locks of a descriptor).
_FLOCK = "@hhqqi4x"


@final
class Segment:
    """One rank's end of the file. Made by :meth:`create` on one rank and by :meth:`open` on the others.

    Attributes:
        name: Of the file.
        token: Its first bytes: proof that the same file is seen.
        size: Its length in bytes.
        memory: All of it, as a tensor of bytes.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        path = DIRECTORY / name
        # The mapping keeps a duplicate of its descriptor. Locks have another one: they go when that is closed.
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != size:
                raise OSError(f"{path} has {os.fstat(descriptor).st_size} bytes and should have {size}")
            self._map = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(descriptor)
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self.token = bytes(self._map[:TOKEN_BYTES])
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        _HELD.add(self)

    @staticmethod
    def create(size: int) -> Segment:
        """A new file, of which all memory is there already.

        Raises:
            OSError: There is no room for it, or no such place.
        """
        name = _PREFIX + secrets.token_hex(16)
        path = DIRECTORY / name
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # A hole that cannot be filled later would end the process with SIGBUS.
            os.posix_fallocate(descriptor, 0, size)
            os.pwrite(descriptor, secrets.token_bytes(TOKEN_BYTES), 0)
            return Segment(name, size)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    @staticmethod
    def open(name: str, size: int, token: bytes) -> Segment:
        """The file that another rank has created.

        Raises:
            OSError: It is not there, or is another one.
        """
        segment = Segment(name, size)
        if segment.token != token:
            segment.close()
            raise OSError(f"{DIRECTORY / name} is a file of somebody else")
        return segment

    @property
    def address(self) -> int:
        return self.memory.data_ptr()

    def bytes(self) -> memoryview:
        """All of its bytes."""
        return memoryview(self._map)

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor that lies in the segment, and keeps it mapped."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset)

    def hold(self, rank: int) -> None:
        """Show that `rank` lives, until the segment is closed or the process ends."""
        fcntl.fcntl(self._open_descriptor(), fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, rank + 1, 1))

    def holds(self, rank: int) -> bool:
        """Whether another end of the segment shows that `rank` lives."""
        answer = fcntl.fcntl(self._open_descriptor(), fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, rank + 1, 1))
        kind: int = struct.unpack(_FLOCK, answer)[0]
        return kind != fcntl.F_UNLCK

    def unlink(self) -> None:
        """Remove the file's name: nobody can open it any more. May be called twice."""
        (DIRECTORY / self.name).unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the lock. The memory goes with the last tensor that lies in it. May be called twice."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise OSError(f"{self.name} is closed")
        return self._descriptor


def _flock(kind: int, start: int, length: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, start, length, 0)


def remove_leftovers() -> None:
    """Remove files of groups whose ranks were all killed while they met: old, ours, and locked by nobody."""
    for path in DIRECTORY.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = path.stat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > _LEFTOVER_S and not _in_use(path):
                path.unlink()


def _in_use(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, 0, 0))
        return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
    finally:
        os.close(descriptor)


@final
class _HeldSegments:
    """Closes them in children made by fork: those would go on showing that a dead parent lives."""

    def __init__(self) -> None:
        self._segments: weakref.WeakSet[Segment] = weakref.WeakSet()
        os.register_at_fork(after_in_child=self._close_all)

    def add(self, segment: Segment) -> None:
        self._segments.add(segment)

    def _close_all(self) -> None:
        for segment in list(self._segments):
            segment.close()


# One per process, as forks are.
_HELD = _HeldSegments()
