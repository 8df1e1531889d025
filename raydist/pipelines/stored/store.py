"""Storage of the elements of a pass in files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import stat
from dataclasses import dataclass
from typing import final

from raydist.errors import FailedPreconditionError, NotFoundError
from raydist.nest import unflatten
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.formats.files import file_errors, local_path
from raydist.pipelines.stored.containers import Container
from raydist.pipelines.stored.manifest import Manifest
from raydist.pipelines.stored.new_directory import new_directory, remove_remains
from raydist.pipelines.stored.write import SavedWriter, ShardFunction, read_manifest

__all__ = ["BusyStoreError", "FileLock", "Recorder", "Store"]

_TRIES = 100  # each fails only if a holder has just released the lock
_MARK = "process "  # first bytes of a lock file
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@final
class FileLock:
    """A lock by `flock` on a file, which exists while the lock is held. The kernel frees it when its process ends.

    Without locks in the file system, every process acquires it: the lock avoids double work and protects nothing.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Acquire the lock if it is free, also in this process; return True on success. Does not wait."""
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
            os.close(descriptor)  # the last holder removed the file before this lock was acquired
        return False

    def _open(self) -> int:
        """Open the lock file; raise FailedPreconditionError if another file has the name, to avoid overwriting it."""
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
        """Return the holder of the lock, for messages."""
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


class BusyStoreError(Exception):
    """Raised while another writer is active; the text names it."""


@final
@dataclass(frozen=True, slots=True)
class Store:
    """A directory for the elements of one complete pass.

    Attributes:
        path: A local path or a URI.
        container: Format of the files.
        shard_func: Returns the shard of an element; None keeps elements in order.
    """

    path: str
    container: Container
    shard_func: ShardFunction | None = None

    def find(self) -> Manifest | None:
        """Return the manifest, or None if there is none. Raises DataLossError if it is damaged."""
        try:
            return read_manifest(self.path)
        except (NotFoundError, NotADirectoryError):
            return None

    def lock(self) -> FileLock | None:
        """Return the lock for writers; None on other file systems, where the first writer to finish wins."""
        local = local_path(self.path)
        return None if local is None else FileLock(f"{local.rstrip('/')}.lock")


@final
class Recorder:
    """A writer of the elements of one pass to a store. Without a commit, nothing remains."""

    def __init__(self, store: Store, origin: str) -> None:
        self._store = store
        self._origin = origin
        self._lock = store.lock()
        self._writer: SavedWriter | None = None

    def open(self) -> None:
        """Acquire the lock, and remove what crashed writers have left.

        Raises:
            BusyStoreError: Another writer is active.
            FailedPreconditionError: The path is taken.
        """
        if self._lock is not None:
            with file_errors(self._lock.path):
                os.makedirs(os.path.dirname(os.path.abspath(self._lock.path)), exist_ok=True)
            if not self._lock.acquire():
                raise BusyStoreError(self._lock.holder())
            remove_remains(self._store.path)
        try:
            new_directory(self._store.path).check_new()
        except BaseException:
            self.close()
            raise

    def write(self, block: Block) -> None:
        """Append elements."""
        if self._writer is None:
            self._writer = self._new_writer(unflatten(block.structure, block.specs))
        self._writer.write(block)

    def _new_writer(self, spec: object) -> SavedWriter:
        store = self._store
        return SavedWriter(new_directory(store.path), spec, store.container, store.shard_func, self._origin)

    def commit(self) -> None:
        """Finish the pass: the elements become visible."""
        writer = self._writer or self._new_writer(TensorSpec())  # without elements, any spec will do
        try:
            writer.commit()
        except FailedPreconditionError:
            if self._store.find() is None:
                raise
            # Another writer was faster, where there are no locks: its elements are the same.
        finally:
            self.close()

    def close(self) -> None:
        """Remove uncommitted files. May be called twice."""
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None
        if self._lock is not None:
            self._lock.release()

    def __del__(self) -> None:
        self.close()  # an iterator that was garbage-collected within a pass
