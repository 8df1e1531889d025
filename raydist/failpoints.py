"""Named places in which a process may be killed, to show that what it wrote before is whole.

They do nothing unless a handler is installed, or the environment of the process says at which of them it ends itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import final

from raydist.errors import InvalidArgumentError

__all__ = ["FAILPOINT_VARIABLE", "KNOWN_FAILPOINTS", "failpoint", "installed"]

FAILPOINT_VARIABLE = "RAYDIST_FAILPOINT"
"""`name` or `name:count`: the process kills itself (SIGKILL) when it comes to the failpoint for the count-th time."""

KNOWN_FAILPOINTS = (
    "checkpoint.before_files",
    "checkpoint.within_file",  # after a part of a tensor's bytes
    "checkpoint.before_flush",  # all of a file is written, none of it need have reached the disk
    "checkpoint.after_flush",
    "checkpoint.before_manifest",
    "checkpoint.within_manifest",
    "checkpoint.before_rename",  # the manifest is safe, but has not its name yet
    "checkpoint.after_rename",
    "retention.before_manifest",
    "retention.after_manifest",  # the manifest is gone, the files are there
    "retention.within_files",
    "retention.after_files",
    "cleanup.before",
    "cleanup.within",
    "cleanup.after",
    "lease.before",
    "lease.within",
    "lease.after",
)
"""All there are, in the order in which a save, what removes an old checkpoint and what follows come to them."""


@final
class _Handlers:
    """Who is told of failpoints."""

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


_handlers = _Handlers()  # one for the process: a save passes failpoints in threads and in files of many modules


def failpoint(name: str) -> None:
    """A place in which the process may be killed; nothing happens unless somebody asked for it.

    >>> failpoint("checkpoint.before_manifest")
    """
    _require_known(name)
    _handlers.tell(name)


def _require_known(name: str) -> None:
    if name not in KNOWN_FAILPOINTS:
        raise InvalidArgumentError(f"A failpoint must be one of {', '.join(KNOWN_FAILPOINTS)}, got {name!r}.")


@contextlib.contextmanager
def installed(handler: Callable[[str], None]) -> Iterator[None]:
    """Have `handler` called with the name of each failpoint, in whatever thread comes to it; it may raise.

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
