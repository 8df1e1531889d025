"""Bugs that a program under trial can be given, to show that the harness would catch them. Each breaks one promise."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

__all__ = ["PLANTED", "POWER_BUGS", "planted"]

POWER_BUGS = ("no_flush", "no_directory_flush")
"""Those that matter only where the power fails."""


@contextlib.contextmanager
def flushes_left_out(is_left_out: Callable[[int], bool]) -> Iterator[None]:
    """`os.fsync` does nothing for some kind of file."""
    flush = os.fsync

    def some(fd: Any) -> None:
        descriptor = fd if isinstance(fd, int) else fd.fileno()
        if not is_left_out(os.fstat(descriptor).st_mode):
            flush(descriptor)

    with mock.patch.object(os, "fsync", some):
        yield


@contextlib.contextmanager
def one_batch_off(data: Any) -> Iterator[None]:
    """The position that is saved is that of the save before."""
    state_dict, states = data.state_dict, []

    def before() -> Any:
        states.append(state_dict())
        return states[-2] if len(states) > 1 else states[-1]

    with mock.patch.object(data, "state_dict", before):
        yield


PLANTED: dict[str, Callable[[Any], contextlib.AbstractContextManager[None]]] = {
    "one_batch_off": lambda run: one_batch_off(run.data),  # `make test` plants the first two
    "no_directory_flush": lambda run: flushes_left_out(stat.S_ISDIR),
    "no_flush": lambda run: flushes_left_out(stat.S_ISREG),
}


def planted(bug: str, run: Any) -> contextlib.AbstractContextManager[None]:
    """The bug of that name; none for an empty one."""
    return PLANTED[bug](run) if bug else contextlib.nullcontext()
