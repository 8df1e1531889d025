"""Bugs that a program under trial can be given, to show that the harness would catch them. Each breaks one promise."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO
from unittest import mock

from raydist.checkpoints import contents
from raydist.checkpoints.capture import Capture, StagingBuffers
from raydist.pipelines.stored.file_directory import LocalFiles

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


@contextlib.contextmanager
def not_copied() -> Iterator[None]:
    """What is saved goes on changing while it is written, a while later."""
    write = LocalFiles.write

    def late(files: LocalFiles, name: str, content: Callable[[BinaryIO], Any]) -> Any:
        time.sleep(0.02)
        return write(files, name, content)

    def as_it_is(self: StagingBuffers, capture: Capture) -> Capture:
        return capture

    with mock.patch.object(StagingBuffers, "copy_capture", as_it_is), mock.patch.object(LocalFiles, "write", late):
        yield


@contextlib.contextmanager
def no_random_state() -> Iterator[None]:
    """Random states stay what they are."""
    with mock.patch.object(contents, "set_random_states"):
        yield


PLANTED: dict[str, Callable[[Any], contextlib.AbstractContextManager[None]]] = {
    "one_batch_off": lambda run: one_batch_off(run.data),  # `make test` plants the first two
    "no_directory_flush": lambda run: flushes_left_out(stat.S_ISDIR),
    "no_flush": lambda run: flushes_left_out(stat.S_ISREG),
    "not_copied": lambda run: not_copied(),
    "no_random_state": lambda run: no_random_state(),
}


def planted(bug: str, run: Any) -> contextlib.AbstractContextManager[None]:
    """The bug of that name; none for an empty one."""
    return PLANTED[bug](run) if bug else contextlib.nullcontext()
