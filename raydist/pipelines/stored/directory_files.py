"""The files of a directory by path or URI; directories of file systems that fsspec knows."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, TypeVar

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError, RaydistError
from raydist.core.failpoints import failpoint
from raydist.pipelines.formats.files import OpenFile, file_errors, local_path, secrets_in, shown_uri
from raydist.pipelines.formats.remote_file import RemoteFile, open_remote, open_system, with_retries
from raydist.pipelines.stored.file_directory import DirectoryFiles, LocalFiles, is_file_name, require_file_name

__all__ = ["DirectoryFiles", "LocalFiles", "RemoteFiles", "directory_files", "directory_of_file"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RemoteFiles(DirectoryFiles):
    """The files of a directory on a file system of fsspec, which may fail temporarily and list new files late."""

    uri: str  # URI with credentials, which messages never contain

    def __repr__(self) -> str:
        return f"RemoteFiles({self.shown!r})"

    @property
    def shown(self) -> str:
        return shown_uri(self.uri)

    @property
    def only_here(self) -> bool:
        return any(part.startswith("memory:") for part in self.uri.split("::"))

    def make(self) -> bool:
        system, inner = self._system()
        with self._errors():
            with_retries(lambda: system.makedirs(inner, exist_ok=True))
        return False  # such systems may not know yet if it existed

    def create(self, name: str) -> BinaryIO:
        system, path = self._at(name)
        with self._errors(name):
            file: BinaryIO = system.open(path, "wb")
            return file

    def finish(self, file: BinaryIO) -> None:
        with self._errors():
            file.close()

    def sync(self) -> None:
        pass  # data is durable once the server has answered

    def write(self, name: str, content: Callable[[BinaryIO], _T]) -> _T:
        system, path = self._at(name)

        def attempt() -> _T:
            with system.open(path, "wb") as file:
                result = content(file)
                size = file.tell()
                failpoint("checkpoint.before_flush")
            failpoint("checkpoint.after_flush")
            system.invalidate_cache()
            if (found := system.info(path)["size"]) != size:
                raise ConnectionError(f"The server must have {size} bytes of {name!r}, but it has {found}")
            return result

        with self._errors(name):
            return with_retries(attempt)

    def replace_by(self, name: str, content: Callable[[BinaryIO], _T]) -> _T:
        system, inner = self._system()
        # Written under another name first: not every file system hides incomplete files.
        temporary = f"{name}.{uuid.uuid4().hex}.tmp"
        result = self.write(temporary, content)
        failpoint("checkpoint.before_rename")
        with self._errors(name):
            with_retries(lambda: system.copy(f"{inner}/{temporary}", f"{inner}/{name}"))
            failpoint("checkpoint.after_rename")
        with contextlib.suppress(Exception):  # the copy counts; a later cleanup removes the temporary file
            system.rm_file(f"{inner}/{temporary}")
        return result

    def open(self, name: str) -> OpenFile:
        system, path = self._at(name)
        with self._errors(name):
            file = RemoteFile(lambda: open_remote(system, path))
        return OpenFile(file, file.size_bytes)

    def _entries(self, kind: Literal["file", "directory"]) -> list[str]:
        system, inner = self._system()

        def entries() -> list[str]:
            system.invalidate_cache()
            found = system.ls(inner, detail=True)
            names = [str(entry["name"]).rstrip("/").rpartition("/")[2] for entry in found if entry["type"] == kind]
            return sorted(name for name in names if is_file_name(name))

        with self._errors(), contextlib.suppress(FileNotFoundError):
            return with_retries(entries)
        return []

    def exists(self, name: str) -> bool:
        system, path = self._at(name)

        def exists() -> bool:
            system.invalidate_cache()
            try:
                system.info(path)
            except FileNotFoundError:
                return False
            return True  # not system.exists: by that a file is missing, too, whenever a request fails

        with self._errors(name):
            return with_retries(exists)

    def remove(self, name: str) -> None:
        system, path = self._at(name)
        with self._errors(name), contextlib.suppress(FileNotFoundError):
            with_retries(lambda: system.rm_file(path))

    def remove_directory(self) -> None:
        system, inner = self._system()
        with contextlib.suppress(Exception):  # many such systems have no directories
            system.rmdir(inner)

    def inside(self, name: str) -> DirectoryFiles:
        require_file_name(name)
        return RemoteFiles(f"{self.uri.partition('?')[0]}/{name}{self._query}")

    @property
    def _query(self) -> str:
        return "".join(self.uri.partition("?")[1:])

    def _system(self) -> tuple[Any, str]:
        try:
            with self._errors():
                system, inner = open_system(self.uri)
                return system, inner.rstrip("/")
        except ImportError as error:
            raise FailedPreconditionError(
                f"{self.shown!r} needs the package of its file system: {error}. Install it."
            ) from error
        except ValueError as error:
            if isinstance(error, RaydistError):
                raise
            raise InvalidArgumentError(
                f"The URI's scheme must be one that fsspec knows, got {self.shown!r}: {error}."
            ) from None

    def _at(self, name: str) -> tuple[Any, str]:
        require_file_name(name)
        system, inner = self._system()
        return system, f"{inner}/{name}"

    @contextlib.contextmanager
    def _errors(self, name: str = "") -> Iterator[None]:
        """Turn errors into errors that show the location without credentials."""
        try:
            with file_errors(f"{self.shown}/{name}".rstrip("/")):
                yield
        except Exception as error:
            secrets = secrets_in(self.uri)
            if not secrets or isinstance(error, ImportError) or type(error) is ValueError:
                raise
            text = str(error)
            for secret in (*secrets, *(part for each in secrets for part in each.split(":") if part)):
                text = text.replace(secret, "***")
            kind = type(error) if isinstance(error, RaydistError) else FailedPreconditionError
            raise kind(text) from None  # the cause shows the URI


def directory_files(uri: str) -> DirectoryFiles:
    """Return the directory at a path or URI, which may not exist yet. Raises InvalidArgumentError if `uri` is empty."""
    if not uri:
        raise InvalidArgumentError("A directory must have a name, got ''. For the one that you are in write '.'.")
    local = local_path(uri)
    return RemoteFiles(uri.rstrip("/")) if local is None else LocalFiles(os.path.abspath(local))


def directory_of_file(path: str, what: str) -> tuple[DirectoryFiles, str]:
    """Return the directory of a file at a path or URI, and the file's name.

    Args:
        path: Path or URI; a query (`?...`) of a URI stays with the directory.
        what: Kind of the file, for messages.

    Raises:
        InvalidArgumentError: `path` ends with a slash.
    """
    local = local_path(path)
    plain, mark, query = (path if local is None else os.path.abspath(local)).partition("?" if local is None else "\0")
    parent, _, name = plain.rpartition("/")
    if not name:
        raise InvalidArgumentError(f"{what} is saved in a file, but {shown_uri(path)!r} names none.")
    return directory_files(f"{parent}{mark}{query}" if parent else "/"), name
