"""The exit reason of a worker's process, to tell a crash of its own code from a kill from outside.

A process that crashes in native code, aborts or calls os._exit writes a line into a memfd, which the pool owns and the
worker opens through /proc; a killed process writes nothing. There is no reason either on another machine, or if a
function replaces these handlers.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import weakref
from collections.abc import Callable
from typing import NoReturn, final

__all__ = ["LastWords", "leave_words"]

_NAME = "raydist-last-words"
_MOST_BYTES = 4096


@final
class LastWords:
    """The pool's end of one worker's exit reason file. Closed with this object."""

    def __init__(self) -> None:
        self._fd: int | None = None
        try:
            self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        except (AttributeError, OSError):  # another system, or too many files
            return
        weakref.finalize(self, os.close, self._fd).atexit = False

    @property
    def path(self) -> str | None:
        """The path by which another process of this machine opens the file; None if there is no file."""
        return None if self._fd is None else f"/proc/{os.getpid()}/fd/{self._fd}"

    def read(self) -> str:
        """Return the exit reason; "" if there is none."""
        if self._fd is None:
            return ""
        written = os.pread(self._fd, _MOST_BYTES, 0).decode(errors="replace")
        return written.partition("\n")[0].strip()


def leave_words(path: str | None) -> bool:
    """Make this process write its exit reason to the file at `path`; return False if the file cannot be opened."""
    try:
        # A process id of another machine or container may name any process here.
        if path is None or _NAME not in os.readlink(path):
            return False
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:
        return False
    faulthandler.disable()  # Ray has enabled it for its log, after its own handlers
    faulthandler.enable(fd, all_threads=False)
    os._exit = functools.partial(_exit_with_words, fd, os.getpid(), os._exit)
    return True


def _exit_with_words(fd: int, pid: int, leave: Callable[[int], NoReturn], status: int) -> NoReturn:
    if os.getpid() == pid:  # the exit of a forked child is no failure
        os.write(fd, f"os._exit({status})\n".encode())
    leave(status)
