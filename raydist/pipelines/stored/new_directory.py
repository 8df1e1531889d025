"""A directory that appears complete or not at all, even with crashes and several writers.

Locally, the files are written to a hidden directory beside the target, which is renamed once all data is durable.
Object stores cannot rename: there the files get unique names, and the manifest, written last, lists the valid ones. In
both cases the first writer to finish wins.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from abc import ABC, abstractmethod
from typing import Any, BinaryIO, final

from raydist.errors import FailedPreconditionError
from raydist.pipelines.formats.files import file_errors, local_path, path_text, shown_uri
from raydist.pipelines.stored.local_files import LocalFiles, sync_directory
from raydist.pipelines.stored.remote_files import RemoteFiles

__all__ = ["MANIFEST_FILE", "NewDirectory", "new_directory", "remove_remains"]

MANIFEST_FILE = "manifest.json"


class NewDirectory(ABC):
    """A directory that is being written."""

    target: str
    prefix: str
    """Required prefix of the names of files."""

    @abstractmethod
    def check_new(self) -> None:
        """Raise FailedPreconditionError if the directory exists already."""

    @abstractmethod
    def create(self, name: str) -> BinaryIO:
        """Create a new file."""

    @abstractmethod
    def finish(self, file: BinaryIO) -> None:
        """Close a file, which is durable on return."""

    @abstractmethod
    def commit(self, manifest: bytes) -> None:
        """Make the directory visible, in one step.

        Raises:
            FailedPreconditionError: Another writer was first. The written files are removed.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Remove the written files. Does nothing after `commit`. May be called twice."""

    def _exists(self) -> FailedPreconditionError:
        return FailedPreconditionError(
            f"Elements can only be written to a path that does not exist yet, got {self.target!r}. Remove it first."
        )


def new_directory(path: Any) -> NewDirectory:
    """Return the directory at `path`, local or a URI that fsspec knows. Creates nothing yet."""
    text = path_text(path)
    local = local_path(text)
    return _RemoteDirectory(text) if local is None else _LocalDirectory(local)


def remove_remains(path: str) -> None:
    """Remove files that crashed writers of a local directory left beside it. No writer may be active."""
    parent, name = os.path.split(os.path.abspath(path))
    with contextlib.suppress(FileNotFoundError):
        for entry in os.listdir(parent):
            if entry.startswith(f".{name}.") and entry.endswith(".tmp"):
                shutil.rmtree(os.path.join(parent, entry), ignore_errors=True)


@final
class _LocalDirectory(NewDirectory):
    def __init__(self, target: str) -> None:
        parent, name = os.path.split(os.path.abspath(target))
        self.target = target
        self.prefix = ""
        self._parent = parent
        self._temporary = os.path.join(parent, f".{name}.{uuid.uuid4().hex}.tmp")
        self._files = LocalFiles(self._temporary)

    def check_new(self) -> None:
        if os.path.lexists(self.target):
            raise self._exists()

    def create(self, name: str) -> BinaryIO:
        if not os.path.isdir(self._temporary):
            with file_errors(self._parent):
                os.mkdir(self._temporary)
        return self._files.create(name)

    def finish(self, file: BinaryIO) -> None:
        with file_errors(self.target):  # such as a full disk: buffered data is written only now
            self._files.finish(file)

    def commit(self, manifest: bytes) -> None:
        try:
            file = self.create(MANIFEST_FILE)
            try:
                file.write(manifest)
            finally:
                self.finish(file)
            self._files.sync()
            self.check_new()
            try:
                os.rename(self._temporary, self.target)
            except OSError as error:
                if os.path.isdir(self.target):  # another writer has just created it
                    raise self._exists() from error
                raise
            sync_directory(self._parent)
        finally:
            self.abandon()

    def abandon(self) -> None:
        shutil.rmtree(self._temporary, ignore_errors=True)


@final
class _RemoteDirectory(NewDirectory):
    def __init__(self, target: str) -> None:
        self.target = shown_uri(target.rstrip("/"))
        self.prefix = f"{uuid.uuid4().hex}-"
        self._files = RemoteFiles(target.rstrip("/"))
        self._created: list[str] = []

    def check_new(self) -> None:
        if self._files.exists(MANIFEST_FILE):
            raise self._exists()

    def create(self, name: str) -> BinaryIO:
        self._files.make()
        self._created.append(name)
        return self._files.create(name)

    def finish(self, file: BinaryIO) -> None:
        self._files.finish(file)

    def commit(self, manifest: bytes) -> None:
        try:
            self.check_new()
            self._files.replace(MANIFEST_FILE, manifest)
            self._created = []
        finally:
            self.abandon()

    def abandon(self) -> None:
        created, self._created = self._created, []
        for name in created:
            with contextlib.suppress(Exception):
                self._files.remove(name)
