"""The files of a directory of this machine, including mounted file systems."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, TypeVar, final

from raydist.errors import DataLossError, FailedPreconditionError
from raydist.failpoints import failpoint
from raydist.pipelines.formats.files import OpenFile, file_errors
from raydist.pipelines.stored.file_directory import DirectoryFiles, is_file_name, require_file_name

__all__ = ["LocalFiles", "locked_directory", "sync_directory"]

_PAUSE_S = 0.005


@contextlib.contextmanager
def locked_directory(path: str, within_s: float) -> Iterator[bool]:
    """Hold a lock on a directory against all threads and processes of this machine; yields True if it was acquired.

    Yields False if the file system has no locks, if the directory is not readable, or if another holder keeps the lock
    for more than `within_s` seconds.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        locked = _lock(descriptor, time.monotonic() + within_s)
        try:
            yield locked
        finally:
            if locked:
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may hold a copy of the descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int, end: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(_PAUSE_S)
        except OSError:  # no locks on this file system
            return False


_T = TypeVar("_T")


def sync_directory(directory: str) -> None:
    """Make the names in a local directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@final
@dataclass(frozen=True, slots=True)
class LocalFiles(DirectoryFiles):
    """The files of a local directory.

    Attributes:
        path: Absolute path.
    """

    path: str

    @property
    def shown(self) -> str:
        return self.path

    def alone(self, within_s: float) -> contextlib.AbstractContextManager[object]:
        return locked_directory(self.path, within_s)

    def make(self) -> bool:
        parent = os.path.dirname(self.path)
        if not os.path.isdir(parent):
            LocalFiles(parent).make()
        with file_errors(self.path):
            try:
                os.mkdir(self.path)
            except (FileExistsError, NotADirectoryError):
                if not os.path.isdir(self.path):
                    raise _no_directory(self.path) from None
                return False
        sync_directory(parent)
        return True

    def create(self, name: str) -> BinaryIO:
        path = self._at(name)
        with file_errors(path):
            return open(path, "xb")

    def sync(self) -> None:
        with contextlib.suppress(FileNotFoundError), file_errors(self.path):
            sync_directory(self.path)

    def finish(self, file: BinaryIO) -> None:
        try:
            file.flush()
            os.fsync(file.fileno())
        finally:
            file.close()

    def write(self, name: str, content: Callable[[BinaryIO], _T]) -> _T:
        path = self._at(name)
        file = self.create(name)
        try:
            with file_errors(path):
                result = content(file)
                failpoint("checkpoint.before_flush")
                self.finish(file)
                failpoint("checkpoint.after_flush")
                return result
        except BaseException:
            with contextlib.suppress(OSError):  # buffered data may not fit on the disk
                file.close()
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise

    def replace(self, name: str, data: bytes) -> None:
        def write(file: BinaryIO) -> None:
            middle = len(data) // 2
            file.write(data[:middle])
            failpoint("checkpoint.within_manifest")
            file.write(data[middle:])

        self.replace_by(name, write)

    def replace_by(self, name: str, content: Callable[[BinaryIO], _T]) -> _T:
        temporary = f"{name}.{uuid.uuid4().hex}.tmp"
        result = self.write(temporary, content)
        failpoint("checkpoint.before_rename")
        with file_errors(self._at(name)):
            os.replace(self._at(temporary), self._at(name))
            failpoint("checkpoint.after_rename")
            self.sync()
        return result

    def open(self, name: str) -> OpenFile:
        path = self._at(name)
        with file_errors(path):
            try:
                # O_NONBLOCK: opening a FIFO would wait for a writer without limit.
                descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                raise _no_plain_file(path, "a link") from None
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise _no_plain_file(path, "a directory" if stat.S_ISDIR(status.st_mode) else "none")
        return OpenFile(os.fdopen(descriptor, "rb", buffering=0), status.st_size)

    def names(self) -> list[str]:
        return self._entries(lambda entry: entry.is_file(follow_symlinks=False))

    def folders(self) -> list[str]:
        return self._entries(lambda entry: entry.is_dir(follow_symlinks=False))

    def _entries(self, wanted: Callable[[os.DirEntry[str]], bool]) -> list[str]:
        try:
            with file_errors(self.path), os.scandir(self.path) as entries:
                return sorted(entry.name for entry in entries if is_file_name(entry.name) and wanted(entry))
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise _no_directory(self.path) from None

    def exists(self, name: str) -> bool:
        return os.path.isfile(self._at(name))

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), file_errors(self._at(name)):
            os.unlink(self._at(name))

    def remove_directory(self) -> None:
        with contextlib.suppress(FileNotFoundError), file_errors(self.path):
            os.rmdir(self.path)

    def inside(self, name: str) -> DirectoryFiles:
        return LocalFiles(self._at(name))

    def _at(self, name: str) -> str:
        require_file_name(name)
        return os.path.join(self.path, name)


def _no_directory(path: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"A directory must be at {path!r}, but it is a file. Move it away, or give another path."
    )


def _no_plain_file(path: str, what: str) -> DataLossError:
    return DataLossError(f"A plain file must be at {path!r}, but it is {what}. Restore it, or use a copy.", path=path)
