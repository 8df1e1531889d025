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
from typing import Any, BinaryIO

from raydist.errors import FailedPreconditionError
from raydist.pipelines.formats.files import file_errors, local_path, path_text
from raydist.pipelines.stored.directory_files import RemoteFiles
from raydist.pipelines.stored.file_directory import DirectoryFiles, LocalFiles, sync_directory

__all__ = ["MANIFEST_FILE", "NewDirectory", "remove_remains"]

MANIFEST_FILE = "manifest.json"


def remove_remains(path: str) -> None:
    """Remove files that crashed writers of a local directory left beside it. No writer may be active."""
    parent, name = os.path.split(os.path.abspath(path))
    with contextlib.suppress(FileNotFoundError):
        for entry in os.listdir(parent):
            if entry.startswith(f".{name}.") and entry.endswith(".tmp"):
                shutil.rmtree(os.path.join(parent, entry), ignore_errors=True)


class NewDirectory:
    """A directory that is being written, local or at a URI that fsspec knows. Creates nothing before the first file.

    Attributes:
        target: Its path, without credentials.
        prefix: Required prefix of the names of files.
    """

    def __init__(self, path: Any) -> None:
        text = path_text(path)
        local = local_path(text)
        self._hidden: str | None = None  # path of the hidden directory, if local
        self._created: list[str] = []  # names of files, if remote
        if local is None:
            remote = RemoteFiles(text.rstrip("/"))
            self.target, self.prefix = remote.shown, f"{uuid.uuid4().hex}-"
            self._files: DirectoryFiles = remote
        else:
            self.target, self.prefix = local, ""
            parent, name = os.path.split(os.path.abspath(local))
            self._hidden = os.path.join(parent, f".{name}.{uuid.uuid4().hex}.tmp")
            self._files = LocalFiles(self._hidden)

    def check_new(self) -> None:
        """Raise FailedPreconditionError if the directory exists already."""
        if self._files.exists(MANIFEST_FILE) if self._hidden is None else os.path.lexists(self.target):
            raise self._exists()

    def create(self, name: str) -> BinaryIO:
        """Create a new file."""
        if self._hidden is None:
            self._files.make()
            self._created.append(name)
        elif not os.path.isdir(self._hidden):
            with file_errors(os.path.dirname(self._hidden)):
                os.mkdir(self._hidden)
        return self._files.create(name)

    def finish(self, file: BinaryIO) -> None:
        """Close a file, which is durable on return."""
        with file_errors(self.target):  # such as a full disk: buffered data is written only now
            self._files.finish(file)

    def commit(self, manifest: bytes) -> None:
        """Make the directory visible, in one step.

        Raises:
            FailedPreconditionError: Another writer was first. The written files are removed.
        """
        try:
            if self._hidden is None:
                self.check_new()
                self._files.replace(MANIFEST_FILE, manifest)
                self._created = []
            else:
                self._rename(self._hidden, manifest)
        finally:
            self.abandon()

    def _rename(self, hidden: str, manifest: bytes) -> None:
        file = self.create(MANIFEST_FILE)
        try:
            file.write(manifest)
        finally:
            self.finish(file)
        self._files.sync()
        self.check_new()
        try:
            os.rename(hidden, self.target)
        except OSError as error:
            if os.path.isdir(self.target):  # another writer has just created it
                raise self._exists() from error
            raise
        sync_directory(os.path.dirname(hidden))

    def abandon(self) -> None:
        """Remove the written files. Does nothing after `commit`. May be called twice."""
        if self._hidden is not None:
            shutil.rmtree(self._hidden, ignore_errors=True)
        created, self._created = self._created, []
        for name in created:
            with contextlib.suppress(Exception):
                self._files.remove(name)

    def _exists(self) -> FailedPreconditionError:
        return FailedPreconditionError(
            f"Elements can only be written to a path that does not exist yet, got {self.target!r}. Remove it first."
        )
