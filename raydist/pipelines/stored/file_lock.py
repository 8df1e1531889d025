"""A lock that one process on a machine can hold, and that is free again when it dies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import stat
from typing import final

from raydist.errors import FailedPreconditionError
from raydist.pipelines.formats.files import file_errors

__all__ = ["FileLock"]

_TRIES = 100  # each is lost only to a holder who has just gone
_MARK = "process "  # what a lock's file begins with
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
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
            descriptor = self._open()
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
                os.write(descriptor, f"{_MARK}{os.getpid()} on {platform.node()}".encode())
                return True
            os.close(descriptor)  # its holder removed the file before we had the lock
        return False

    def _open(self) -> int:
        """FailedPreconditionError where something else has the name, which would be overwritten."""
        try:
            with file_errors(self.path):
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o644)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise self._taken("a link") from error
            raise
        status = os.fstat(descriptor)
        plain = stat.S_ISREG(status.st_mode) and status.st_nlink <= 1
        if not plain or os.pread(descriptor, len(_MARK), 0) not in (b"", _MARK.encode()):
            os.close(descriptor)
            raise self._taken("another file")
        return descriptor

    def _taken(self, what: str) -> FailedPreconditionError:
        return FailedPreconditionError(
            f"The name of a lock must be free, but {self.path!r} is {what}, which would be overwritten. Move it away, "
            "or write to another path."
        )

    def _is_current(self, descriptor: int) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        return False

    def holder(self) -> str:
        """Who holds it, for messages."""
        with contextlib.suppress(OSError):
            descriptor = os.open(self.path, os.O_RDONLY | _FLAGS)
            try:
                return os.read(descriptor, 200).decode(errors="replace") or "somebody"
            finally:
                os.close(descriptor)
        return "somebody who has just gone"

    def release(self) -> None:
        """Free the lock. May be called twice."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may hold a copy of the descriptor
            os.close(descriptor)
