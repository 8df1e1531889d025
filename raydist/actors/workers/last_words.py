"""What a worker's process says when its own code ends it, so that this can be told from a kill from outside.

A process that is killed says nothing. One that crashes in native code, aborts or calls os._exit writes a line into a
file without a name, which the pool keeps and the worker finds through /proc: so on the same machine only. Elsewhere,
and where a function takes these ways out of our hands, the worker dies without a word.
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
    """The file of one worker, as its pool has it. Closed when it is dropped."""

    def __init__(self) -> None:
        self._fd: int | None = None
        try:
            self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        except (AttributeError, OSError):  # another system, or too many files
            return
        weakref.finalize(self, os.close, self._fd).atexit = False

    @property
    def path(self) -> str | None:
        """Where another process of this machine finds the file; None if there is none."""
        return None if self._fd is None else f"/proc/{os.getpid()}/fd/{self._fd}"

    def read(self) -> str:
        """The line that says what happened; "" for nothing."""
        if self._fd is None:
            return ""
        written = os.pread(self._fd, _MOST_BYTES, 0).decode(errors="replace")
        return written.partition("\n")[0].strip()


def leave_words(path: str | None) -> bool:
    """From now on this process says in the file at `path` how it ends itself. Whether it can."""
    try:
        # Process ids of another machine or container may mean anything here.
        if path is None or _NAME not in os.readlink(path):
            return False
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:
        return False
    faulthandler.disable()  # Ray has it write to its log, and handlers of its own before it
    faulthandler.enable(fd, all_threads=False)
    os._exit = functools.partial(_exit_with_words, fd, os.getpid(), os._exit)
    return True


def _exit_with_words(fd: int, pid: int, leave: Callable[[int], NoReturn], status: int) -> NoReturn:
    if os.getpid() == pid:  # a forked child may go
        os.write(fd, f"os._exit({status})\n".encode())
    leave(status)
