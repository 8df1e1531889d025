"""Simulated power loss: a disk keeps flushed data, and nothing else.

A process that is killed loses none of what it wrote; a machine that loses its power does. Files of which nothing was
flushed (`os.fsync`) are then empty or gone, and so are names in a directory that was not flushed after them. That is
what a program under trial is left with here: while it runs, each flush is noted; when it is dead, its folder is made
again from the notes. The worst case is taken: all that may be lost is.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

__all__ = ["FLUSHES_VARIABLE", "lose_power", "noted_flushes"]

FLUSHES_VARIABLE = "RAYDIST_FLUSHES"
"""Names the folder of the notes in the environment of a program whose machine is going to lose its power."""

_NOTES = "notes"


@contextlib.contextmanager
def noted_flushes(folder: Path, notes: Path) -> Iterator[None]:
    """Note what this process flushes until the end of the block; what is in `folder` already counts as flushed."""
    flush, noting = os.fsync, _Noting(notes, os.fsync)
    notes.mkdir(parents=True, exist_ok=True)
    for path in (folder, *folder.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            noting(descriptor)
        finally:
            os.close(descriptor)
    os.fsync = noting  # where all of Python's flushes pass
    try:
        yield
    finally:
        os.fsync = flush
        noting.close()


@final
class _Noting:
    """Flushes, and remembers what then lies on the disk."""

    def __init__(self, notes: Path, flush: Callable[[int], None]) -> None:
        self._notes = notes
        self._flush = flush
        self._held: list[int] = []  # directories: an inode that is in use stands for nothing else later

    def __call__(self, fd: Any) -> None:  # the name that os.fsync gives it
        descriptor = fd if isinstance(fd, int) else fd.fileno()
        self._flush(descriptor)
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            self._held.append(os.dup(descriptor))
            with os.scandir(descriptor) as entries:
                names = {entry.name: [entry.inode(), entry.is_dir(follow_symlinks=False)] for entry in entries}
            self._note({"directory": status.st_ino, "names": names})
        else:
            with contextlib.suppress(FileExistsError, FileNotFoundError):  # as before; or it has no name any more
                os.link(os.readlink(f"/proc/self/fd/{descriptor}"), self._notes / str(status.st_ino))
            self._note({"file": status.st_ino, "size": status.st_size})

    def _note(self, line: dict[str, Any]) -> None:
        descriptor = os.open(self._notes / _NOTES, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, json.dumps(line).encode() + b"\n")
        finally:
            os.close(descriptor)

    def close(self) -> None:
        while self._held:
            os.close(self._held.pop())


@final
@dataclass
class _Disk:
    """The flushed state: names by directory, sizes by file; both by inode."""

    names: dict[int, dict[str, tuple[int, bool]]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, lines: Iterable[str]) -> _Disk:
        disk = cls()
        for line in map(json.loads, lines):
            if "directory" in line:
                disk.names[line["directory"]] = {name: tuple(entry) for name, entry in line["names"].items()}
            else:
                disk.sizes[line["file"]] = line["size"]
        return disk


def lose_power(folder: Path, notes: Path) -> None:
    """Leave in a folder what was flushed of it according to the notes, which are used up. Nobody else may use it."""
    file = notes / _NOTES
    disk = _Disk.of(file.read_text().splitlines() if file.exists() else ())
    left = folder.with_name(f"{folder.name}.left")
    _make_again(folder.stat().st_ino, left, disk, notes)
    shutil.rmtree(folder)
    left.rename(folder)
    shutil.rmtree(notes, ignore_errors=True)


def _make_again(inode: int, left: Path, disk: _Disk, notes: Path) -> None:
    left.mkdir()
    for name, (child, is_directory) in disk.names.get(inode, {}).items():
        if is_directory:
            _make_again(child, left / name, disk, notes)
        else:
            kept = notes / str(child)
            content = kept.read_bytes() if kept.exists() else b""
            (left / name).write_bytes(content[: disk.sizes.get(child, 0)])
