"""Whether a file is the one that it was: a place in it that was saved means nothing in another one."""

from __future__ import annotations

import contextlib
import os

from raydist.errors import FailedPreconditionError
from raydist.pipelines.formats.files import local_path

__all__ = ["local_size", "require_same_size"]


def local_size(path: str) -> int:
    """Bytes of a file of this machine; 0 where that would take asking a server, or there is none.

    >>> local_size("s3://bucket/a")
    0
    """
    with contextlib.suppress(OSError, ValueError):  # who opens it says what is wrong with it
        local = local_path(path)
        return 0 if local is None else os.path.getsize(local)
    return 0


def require_same_size(path: str, saved: int) -> None:
    """FailedPreconditionError where a file has another size than it had; nothing where nobody knows, which is 0."""
    found = local_size(path)
    if saved and found and found != saved:
        raise FailedPreconditionError(
            f"A file must be as it was when the state was saved that a dataset goes on from, but {path!r} had {saved} "
            f"bytes then and has {found} now. Restore the file, or begin a new epoch."
        )
