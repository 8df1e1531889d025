"""Remove checkpoints, and the leftovers of killed saves and removals. Each removal may be killed and repeated.

A run's directory may contain files of the user: only files that certainly come from a save are removed.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable

from raydist.checkpoints.new_files import MANIFEST_NAME, is_new_name, may_be_of_checkpoint, stem_of
from raydist.checkpoints.saved_checkpoint import named_files
from raydist.failpoints import failpoint
from raydist.pipelines.stored.directory_files import DirectoryFiles

__all__ = ["remove_checkpoint", "remove_what_was_killed"]


def remove_checkpoint(files: DirectoryFiles) -> None:
    """Remove a checkpoint: first the manifest, then the other files. Files of other origin stay.

    Args:
        files: Files of the checkpoint's directory.
    """
    known = named_files(files)  # read first, because the listing of an object store may lag behind
    failpoint("retention.before_manifest")
    files.remove(MANIFEST_NAME)
    files.sync()  # if the manifest came back, it would name removed files
    failpoint("retention.after_manifest")
    for name in sorted({*known, *filter(may_be_of_checkpoint, files.names())} - {MANIFEST_NAME}):
        files.remove(name)
        failpoint("retention.within_files")
    _remove_directory(files)
    failpoint("retention.after_files")


def remove_what_was_killed(root: DirectoryFiles, folders: Iterable[str]) -> None:
    """Remove all files that no manifest names. The caller guarantees that no process is writing.

    A directory without a manifest that contains files of other origin stays.

    Args:
        root: Directory of all checkpoints.
        folders: Subdirectories that may contain files of checkpoints.
    """
    failpoint("cleanup.before")
    for folder in folders:
        files = root.inside(folder)
        is_whole = files.exists(MANIFEST_NAME)  # the listing of an object store may lag behind
        for name in _unnamed(files) if is_whole else _of_no_one_else(files):
            files.remove(name)
            failpoint("cleanup.within")
        if not is_whole:
            _remove_directory(files)
    failpoint("cleanup.after")


def _of_no_one_else(files: DirectoryFiles) -> list[str]:
    """Return all files of a directory if saves may have written all of them; otherwise none."""
    names = files.names()
    return names if all(map(may_be_of_checkpoint, names)) and not files.folders() else []


def _unnamed(files: DirectoryFiles) -> list[str]:
    """Return the leftovers of saves beside a complete checkpoint; none if the manifest is unreadable."""
    named = named_files(files)
    stems = {stem_of(name) for name in named}
    left = [name for name in files.names() if is_new_name(name) or stem_of(name) in stems]
    return [name for name in left if name not in named] if named else []


def _remove_directory(files: DirectoryFiles) -> None:
    try:
        files.remove_directory()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
