"""Access to the files of a directory, by path or URI."""

from __future__ import annotations

import os

from raydist.errors import InvalidArgumentError
from raydist.pipelines.formats.files import local_path
from raydist.pipelines.stored.file_directory import DirectoryFiles
from raydist.pipelines.stored.local_files import LocalFiles
from raydist.pipelines.stored.remote_files import RemoteFiles

__all__ = ["DirectoryFiles", "LocalFiles", "RemoteFiles", "directory_files"]


def directory_files(uri: str) -> DirectoryFiles:
    """Return the directory at a path or URI, which may not exist yet. Raises InvalidArgumentError if `uri` is empty."""
    if not uri:
        raise InvalidArgumentError("A directory must have a name, got ''. For the one that you are in write '.'.")
    local = local_path(uri)
    return RemoteFiles(uri.rstrip("/")) if local is None else LocalFiles(os.path.abspath(local))
