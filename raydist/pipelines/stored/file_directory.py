"""One directory of files: the interface, and local directories, including mounted file systems.

A new file is durable once it is finished, and a file can be replaced atomically. Names may come from files that others
have written: they must not be paths, and links are not followed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal, TypeVar

from raydist.core.errors import DataLossError, FailedPreconditionError, InvalidArgumentError
from raydist.core.failpoints import failpoint
from raydist.pipelines.formats.files import OpenFile, file_errors

_T = TypeVar("_T")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_PAUSE_S = 0.005


def is_file_name(name: object) -> bool:
    """Return True for the name of a plain file, which is not a path.

    >>> is_file_name("a-00001.safetensors"), is_file_name("../a"), is_file_name(".hidden")
    (True, False, False)
    """
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


class DirectoryFiles(ABC):
    """The files of one directory. Immutable and small, so that it can be sent to other processes."""

    @property
    @abstractmethod
    def shown(self) -> str:
        """The location without credentials, for messages."""

    @property
    def only_here(self) -> bool:
        """True if the directory is in the memory of this process, so that no other process sees the same files."""
        return False

    def alone(self, within_s: float) -> contextlib.AbstractContextManager[object]:
        """Return a lock against other users of the directory on this machine, where the file system has locks.

        Args:
            within_s: Seconds to wait for another holder.
        """
        return contextlib.nullcontext()

    @abstractmethod
    def make(self) -> bool:
        """Create the directory if it is missing. Return True if it certainly did not exist."""

    @abstractmethod
    def write(self, name: str, content: Callable[[BinaryIO], _T]) -> _T:
        """Write a new file, durable on return. `content` writes the data; it may be called again after a failure."""

    def replace(self, name: str, data: bytes) -> None:
        """Replace `name` by `data`, atomically; durable on return."""

        def write(file: BinaryIO) -> None:
            middle = len(data) // 2
            file.write(data[:middle])
            failpoint("checkpoint.within_manifest")
            file.write(data[middle:])

        self.replace_by(name, write)

    @abstractmethod
    def replace_by(self, name: str, content: Callable[[BinaryIO], _T]) -> _T:
        """Replace a file like `replace`, by the data that `content` writes, even again after a failure."""

    @abstractmethod
    def create(self, name: str) -> BinaryIO:
        """Create a new file, which `finish` closes."""

    @abstractmethod
    def finish(self, file: BinaryIO) -> None:
        """Close a file from `create`; the file is durable on return."""

    @abstractmethod
    def sync(self) -> None:
        """Make created and removed names durable."""

    @abstractmethod
    def open(self, name: str) -> OpenFile:
        """Open a file for reading. Raises NotFoundError if it is missing, DataLossError if it is not a plain file."""

    def names(self) -> list[str]:
        """Return the names of the files, sorted, without unusual names; an empty list without a directory."""
        return self._entries("file")

    def folders(self) -> list[str]:
        """Return the names of the subdirectories, like `names`, without links."""
        return self._entries("directory")

    @abstractmethod
    def _entries(self, kind: Literal["file", "directory"]) -> list[str]: ...

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Return True if the file exists."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file. Does nothing if it is missing."""

    @abstractmethod
    def remove_directory(self) -> None:
        """Remove the directory, which must be empty. Does nothing if it is missing."""

    @abstractmethod
    def inside(self, name: str) -> DirectoryFiles:
        """Return the subdirectory with that name."""


def require_file_name(name: str) -> None:
    """Raise InvalidArgumentError unless `name` is the name of a plain file."""
    if not is_file_name(name):
        raise InvalidArgumentError(
            f"The name of a file must consist of letters, digits, '.', '_' and '-', got {name!r:.200}."
        )


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


def sync_directory(directory: str) -> None:
    """Make the names in a local directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class LocalFiles(DirectoryFiles):
    """The files of a local directory."""

    path: str  # absolute path

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

    def _entries(self, kind: Literal["file", "directory"]) -> list[str]:
        wanted = os.DirEntry.is_file if kind == "file" else os.DirEntry.is_dir
        try:
            with file_errors(self.path), os.scandir(self.path) as entries:
                return sorted(
                    entry.name for entry in entries if is_file_name(entry.name) and wanted(entry, follow_symlinks=False)
                )
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
