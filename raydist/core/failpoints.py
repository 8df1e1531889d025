"""Named points at which a test may kill the process, to show that the files written before are complete.

A failpoint does nothing unless a handler is installed, or the environment names the failpoint that kills the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import final

from raydist.core.errors import InvalidArgumentError

FAILPOINT_VARIABLE = "RAYDIST_FAILPOINT"
"""`name` or `name:count`: the process kills itself (SIGKILL) at the count-th pass of the failpoint."""

KNOWN_FAILPOINTS = (
    "checkpoint.before_files",
    "checkpoint.within_file",  # after a part of a tensor's bytes
    "checkpoint.before_flush",  # the file is written, but perhaps nothing of it is on disk
    "checkpoint.after_flush",
    "checkpoint.before_manifest",
    "checkpoint.within_manifest",
    "checkpoint.before_rename",  # the manifest is on disk, under a temporary name
    "checkpoint.after_rename",
    "retention.before_manifest",
    "retention.after_manifest",  # the manifest is gone, the files are still there
    "retention.within_files",
    "retention.after_files",
    "cleanup.before",
    "cleanup.within",
    "cleanup.after",
    "lease.before",
    "lease.within",
    "lease.after",
)
"""All failpoints, in the order of a save, the removal of old checkpoints, and the cleanup."""


@final
class _Handlers:
    """The installed handlers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handlers: tuple[Callable[[str], None], ...] = ()
        self._passed = 0

    def add(self, handler: Callable[[str], None]) -> None:
        with self._lock:
            self._handlers = (*self._handlers, handler)

    def remove(self, handler: Callable[[str], None]) -> None:
        with self._lock:
            self._handlers = tuple(each for each in self._handlers if each is not handler)

    def tell(self, name: str) -> None:
        for handler in self._handlers:
            handler(name)
        wanted = os.environ.get(FAILPOINT_VARIABLE)
        if wanted is not None:
            self._end_if_meant(wanted, name)

    def _end_if_meant(self, wanted: str, name: str) -> None:
        meant, _, count = wanted.partition(":")
        _require_known(meant)
        if meant == name:
            with self._lock:
                self._passed += 1
                if self._passed == int(count or 1):
                    os.kill(os.getpid(), signal.SIGKILL)


_handlers = _Handlers()  # one per process: a save passes failpoints in several threads and modules


def failpoint(name: str) -> None:
    """Mark a point at which a test may kill the process; otherwise nothing happens.

    >>> failpoint("checkpoint.before_manifest")
    """
    _require_known(name)
    _handlers.tell(name)


def _require_known(name: str) -> None:
    if name not in KNOWN_FAILPOINTS:
        raise InvalidArgumentError(f"A failpoint must be one of {', '.join(KNOWN_FAILPOINTS)}, got {name!r}.")


@contextlib.contextmanager
def installed(handler: Callable[[str], None]) -> Iterator[None]:
    """Call `handler` with the name of each failpoint within the context, in any thread; the handler may raise.

    >>> passed = []
    >>> with installed(passed.append):
    ...     failpoint("checkpoint.before_manifest")
    >>> passed
    ['checkpoint.before_manifest']
    """
    _handlers.add(handler)
    try:
        yield
    finally:
        _handlers.remove(handler)
