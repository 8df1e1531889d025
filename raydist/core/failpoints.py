"""Named points at which a test may kill the process, to show that the files written before are complete.

A failpoint does nothing unless a handler is installed, or the environment names the failpoint that kills the process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Iterator

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


_handlers: list[Callable[[str], None]] = []
_passed = itertools.count(1)  # passes of the failpoint that kills the process: a save passes it in several threads


def failpoint(name: str) -> None:
    """Mark a point at which a test may kill the process; otherwise nothing happens.

    >>> failpoint("checkpoint.before_manifest")
    """
    _require_known(name)
    for handler in tuple(_handlers):
        handler(name)
    wanted, _, count = os.environ.get(FAILPOINT_VARIABLE, "").partition(":")
    if wanted:
        _require_known(wanted)
    if wanted == name and next(_passed) == int(count or 1):
        os.kill(os.getpid(), signal.SIGKILL)


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
    _handlers.append(handler)
    try:
        yield
    finally:
        _handlers.remove(handler)
