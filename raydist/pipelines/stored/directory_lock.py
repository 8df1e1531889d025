"""A lock on a directory of this machine, for the moment of a look and a write; it leaves no file there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator

__all__ = ["locked_directory"]

_PAUSE_S = 0.005


@contextlib.contextmanager
def locked_directory(path: str, within_s: float) -> Iterator[bool]:
    """Inside, no other thread or process of this machine is. It says whether that is so.

    It is not where the file system has no locks, where the directory may not be read, or where somebody stays inside
    for longer than `within_s`.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        locked = _lock(descriptor, time.monotonic() + within_s)
        try:
            yield locked
        finally:
            if locked:
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may hold a copy of the descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int, end: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(_PAUSE_S)
        except OSError:  # none here
            return False
