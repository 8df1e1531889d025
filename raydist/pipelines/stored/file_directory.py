"""Interface of one directory of files, local or remote. A new file is durable once it is finished, and a file can be
replaced atomically.

Names may come from files that others have written: they must not be paths, and links are not followed.
"""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import BinaryIO, TypeVar

from raydist.errors import InvalidArgumentError
from raydist.pipelines.formats.files import OpenFile

__all__ = ["DirectoryFiles", "is_file_name", "require_file_name"]

_T = TypeVar("_T")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


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

    @abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """Replace `name` by `data`, atomically; durable on return."""

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

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of the files, sorted, without unusual names; an empty list without a directory."""

    @abstractmethod
    def folders(self) -> list[str]:
        """Return the names of the subdirectories, like `names`, without links."""

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
