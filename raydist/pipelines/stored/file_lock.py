"""A lock that one process on a machine can hold, and that is free again when it dies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
from typing import final

from raydist.pipelines.formats.files import file_errors

__all__ = ["FileLock"]

_TRIES = 100  # each is lost only to a holder who has just gone
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@final
class FileLock:
    """An `flock` of a file, which exists while the lock is held. The kernel frees it when its process ends.

    On a file system without locks everybody gets it: it saves double work and protects nothing.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Take the lock if nobody has it, this process included. Does not wait."""
        for _ in range(_TRIES):
            with file_errors(self.path):
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                if isinstance(error, BlockingIOError):
                    return False
                if error.errno in _NO_LOCKS:
                    return True
                raise
            if self._is_current(descriptor):
                self._descriptor = descriptor
                os.truncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {platform.node()}".encode())
                return True
            os.close(descriptor)  # its holder removed the file before we had the lock
        return False

    def _is_current(self, descriptor: int) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        return False

    def holder(self) -> str:
        """Who holds it, for messages."""
        with contextlib.suppress(OSError), open(self.path) as file:
            return file.read(200) or "somebody"
        return "somebody who has just gone"

    def release(self) -> None:
        """Free the lock. May be called twice."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may hold a copy of the descriptor
            os.close(descriptor)
