"""A directory of files that is there as a whole or not at all, whoever crashes and however many write it at a time.

On this machine the files are written into a hidden directory beside it, which is renamed when everything has reached
the disk. Object stores cannot rename: there the files get names of their own, and the manifest, written last, says
which of them count. In both, the first who finishes wins.
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
    """Files that are being written."""

    target: str
    prefix: str
    """What the names of files must begin with."""

    @abstractmethod
    def check_new(self) -> None:
        """FailedPreconditionError where the directory exists already."""

    @abstractmethod
    def create(self, name: str) -> BinaryIO:
        """A new file."""

    @abstractmethod
    def finish(self, file: BinaryIO) -> None:
        """Close a file; it is safe when this returns."""

    @abstractmethod
    def commit(self, manifest: bytes) -> None:
        """Let everything appear, in one step.

        Raises:
            FailedPreconditionError: Somebody else was first. What was written is removed.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Remove what was written. Does nothing after `commit`. May be called twice."""

    def _exists(self) -> FailedPreconditionError:
        return FailedPreconditionError(
            f"Elements can only be written to a path that does not exist yet, got {self.target!r}. Remove it first."
        )


def new_directory(path: Any) -> NewDirectory:
    """The directory at `path`, local or a URI that fsspec knows. Creates nothing yet."""
    text = path_text(path)
    local = local_path(text)
    return _RemoteDirectory(text) if local is None else _LocalDirectory(local)


def remove_remains(path: str) -> None:
    """Remove what crashed writers of a local directory left beside it. The caller knows that nobody is writing."""
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
        with file_errors(self.target):  # a full disk, say: what is buffered is written only now
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
                if os.path.isdir(self.target):  # it has come into being just now
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
