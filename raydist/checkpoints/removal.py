"""Removing checkpoints, and what killed saves and removals have left. Each may be killed, and done again.

Nothing goes of which it is not sure that a save has written it: a run's directory may hold what is its user's.
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
    """Remove a checkpoint: it is gone when its manifest is, the rest follows. What others have put there stays.

    Args:
        files: Of its directory.
    """
    known = named_files(files)  # a store that lists late may not tell
    failpoint("retention.before_manifest")
    files.remove(MANIFEST_NAME)
    files.sync()  # a manifest that came back would name files that are gone
    failpoint("retention.after_manifest")
    for name in sorted({*known, *filter(may_be_of_checkpoint, files.names())} - {MANIFEST_NAME}):
        files.remove(name)
        failpoint("retention.within_files")
    _remove_directory(files)
    failpoint("retention.after_files")


def remove_what_was_killed(root: DirectoryFiles, folders: Iterable[str]) -> None:
    """Remove all that no manifest names. The caller knows that nobody is writing.

    A folder without a manifest that holds anything else than what saves write is somebody else's, and stays.

    Args:
        root: Of all checkpoints.
        folders: Those that may have something of checkpoints in them.
    """
    failpoint("cleanup.before")
    for folder in folders:
        files = root.inside(folder)
        is_whole = files.exists(MANIFEST_NAME)  # a store that lists late may not list it
        for name in _unnamed(files) if is_whole else _of_no_one_else(files):
            files.remove(name)
            failpoint("cleanup.within")
        if not is_whole:
            _remove_directory(files)
    failpoint("cleanup.after")


def _of_no_one_else(files: DirectoryFiles) -> list[str]:
    """All files of a directory, where these are such as saves write."""
    names = files.names()
    return names if all(map(may_be_of_checkpoint, names)) and not files.folders() else []


def _unnamed(files: DirectoryFiles) -> list[str]:
    """What saves have left beside a whole checkpoint; nothing where nobody can tell what is part of it."""
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
