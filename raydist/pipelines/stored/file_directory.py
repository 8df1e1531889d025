"""What can be done with the files of one directory, wherever it is: what is written under a name that was not there is
safe when it is finished, and one file can be replaced as a whole.

Names come from files that strangers may have written: they are never paths, and links are not followed.
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
    """Whether it is what is written, and nothing that is a path.

    >>> is_file_name("a-00001.safetensors"), is_file_name("../a"), is_file_name(".hidden")
    (True, False, False)
    """
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


class DirectoryFiles(ABC):
    """The files of one directory. Frozen and small: it travels to whoever writes or reads some of them."""

    @property
    @abstractmethod
    def shown(self) -> str:
        """Where it is, for messages: without credentials."""

    @property
    def only_here(self) -> bool:
        """Whether it is in the memory of this process: no other one sees the same files."""
        return False

    def alone(self, within_s: float) -> contextlib.AbstractContextManager[object]:
        """Inside, nobody else of this machine is, as far as the file system has locks: to look, and write at once.

        Args:
            within_s: How long somebody else may stay there, for whom nobody waits longer.
        """
        return contextlib.nullcontext()

    @abstractmethod
    def make(self) -> bool:
        """See that the directory exists. Returns whether it surely did not before."""

    @abstractmethod
    def write(self, name: str, content: Callable[[BinaryIO], _T]) -> _T:
        """A new file, safe when this returns. `content` writes it; it may be called again after a failure."""

    @abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """Have `name` be `data`, all of it or not at all; safe when this returns."""

    @abstractmethod
    def replace_by(self, name: str, content: Callable[[BinaryIO], _T]) -> _T:
        """As `replace`, with what `content` writes; it may be called again after a failure."""

    @abstractmethod
    def create(self, name: str) -> BinaryIO:
        """A new file, to be closed by `finish`."""

    @abstractmethod
    def finish(self, file: BinaryIO) -> None:
        """Close a file that `create` gave; it is safe when this returns."""

    @abstractmethod
    def sync(self) -> None:
        """Have the names of its files, or that they are gone, reach the disk."""

    @abstractmethod
    def open(self, name: str) -> OpenFile:
        """Open a file of it for reading. NotFoundError where it is missing, DataLossError where it is no plain file."""

    @abstractmethod
    def names(self) -> list[str]:
        """The files in it, in order; none where the directory is missing. What is no plain name is not listed."""

    @abstractmethod
    def folders(self) -> list[str]:
        """The directories in it, as `names` does; links are none."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether there is such a file."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file. Does nothing where it is missing."""

    @abstractmethod
    def remove_directory(self) -> None:
        """Remove the directory, which must be empty. Does nothing where it is missing."""

    @abstractmethod
    def inside(self, name: str) -> DirectoryFiles:
        """The directory of that name in it."""


def require_file_name(name: str) -> None:
    """InvalidArgumentError for anything else."""
    if not is_file_name(name):
        raise InvalidArgumentError(
            f"The name of a file must consist of letters, digits, '.', '_' and '-', got {name!r:.200}."
        )
