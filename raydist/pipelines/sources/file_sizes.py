"""Checks that a file has not changed: a saved position in a file is meaningless in another file."""

from __future__ import annotations

import contextlib
import os

from raydist.errors import FailedPreconditionError
from raydist.pipelines.formats.files import local_path

__all__ = ["local_size", "require_same_size"]


def local_size(path: str) -> int:
    """Return the bytes of a file of this machine; 0 for remote and missing files.

    >>> local_size("s3://bucket/a")
    0
    """
    with contextlib.suppress(OSError, ValueError):  # opening the file raises the error
        local = local_path(path)
        return 0 if local is None else os.path.getsize(local)
    return 0


def require_same_size(path: str, saved: int) -> None:
    """Raise FailedPreconditionError if the size of a file has changed. A size of 0 is unknown and fits every file."""
    found = local_size(path)
    if saved and found and found != saved:
        raise FailedPreconditionError(
            f"A file must be as it was when the state was saved that a dataset goes on from, but {path!r} had {saved} "
            f"bytes then and has {found} now. Restore the file, or begin a new epoch."
        )
