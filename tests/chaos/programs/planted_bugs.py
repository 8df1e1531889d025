"""Bugs that a program under trial can be given, to show that the harness would catch them. Each breaks one promise."""

from __future__ import annotations

import contextlib
import functools
import io
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
def manifest_first() -> Iterator[None]:
    """Files are written when the manifest is there already."""
    write, replace = LocalFiles.write, LocalFiles.replace
    held: list[tuple[LocalFiles, str, bytes]] = []

    def later(files: LocalFiles, name: str, content: Callable[[BinaryIO], Any]) -> Any:
        if name.startswith("manifest"):
            return write(files, name, content)
        memory = io.BytesIO()
        result = content(memory)
        held.append((files, name, memory.getvalue()))
        return result

    def before(files: LocalFiles, name: str, data: bytes) -> None:
        replace(files, name, data)
        while held:
            where, which, content = held.pop(0)
            write(where, which, functools.partial(_put, content))

    with mock.patch.object(LocalFiles, "write", later), mock.patch.object(LocalFiles, "replace", before):
        yield


def _put(content: bytes, file: BinaryIO) -> int:
    return file.write(content)


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


@contextlib.contextmanager
def acknowledged_early(run: Any) -> Iterator[None]:
    """What has been asked for counts as safe."""

    def tell() -> None:
        for step, _ in run.asked:
            run.journal.acknowledged(step)
        run.asked.clear()

    with mock.patch.object(run, "tell", tell):
        yield


PLANTED: dict[str, Callable[[Any], contextlib.AbstractContextManager[None]]] = {
    "no_flush": lambda run: flushes_left_out(stat.S_ISREG),
    "no_directory_flush": lambda run: flushes_left_out(stat.S_ISDIR),
    "manifest_first": lambda run: manifest_first(),
    "one_batch_off": lambda run: one_batch_off(run.data),
    "not_copied": lambda run: not_copied(),
    "no_random_state": lambda run: no_random_state(),
    "acknowledged_early": acknowledged_early,
}


def planted(bug: str, run: Any) -> contextlib.AbstractContextManager[None]:
    """The bug of that name; none for an empty one."""
    return PLANTED[bug](run) if bug else contextlib.nullcontext()
