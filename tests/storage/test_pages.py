from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from pathlib import Path

import pytest
import torch

from raydist.storage.pages import PAGE_BYTES, written_ranges


def mapping(num_pages: int) -> mmap.mmap:
    with tempfile.TemporaryFile(dir="/dev/shm") as file:  # as the code does; the file has no name
        os.truncate(file.fileno(), num_pages * PAGE_BYTES)
        return mmap.mmap(file.fileno(), num_pages * PAGE_BYTES, flags=mmap.MAP_PRIVATE)


def ranges(mapped: mmap.mmap) -> list[tuple[int, int]] | None:
    return written_ranges(torch.frombuffer(mapped, dtype=torch.uint8).data_ptr(), len(mapped))


def refuse_to_scan(*_: object) -> int:
    raise OSError("this kernel is older")


@pytest.mark.parametrize("scans", [True, False])
def test_written_pages_are_told_and_read_ones_are_not(scans: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not scans:
        monkeypatch.setattr(fcntl, "ioctl", refuse_to_scan)
    mapped = mapping(8)
    assert sum(mapped[page * PAGE_BYTES] for page in range(8)) == 0
    assert ranges(mapped) == []
    for page in (0, 1, 5):
        mapped[page * PAGE_BYTES + 7] = 1
    assert ranges(mapped) == [(0, 2 * PAGE_BYTES), (5 * PAGE_BYTES, 6 * PAGE_BYTES)]
    mapped.madvise(mmap.MADV_DONTNEED, PAGE_BYTES, PAGE_BYTES)
    assert ranges(mapped) == [(0, PAGE_BYTES), (5 * PAGE_BYTES, 6 * PAGE_BYTES)]


@pytest.mark.parametrize("scans", [True, False])
def test_many_ranges(scans: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not scans:
        monkeypatch.setattr(fcntl, "ioctl", refuse_to_scan)
    mapped = mapping(400)
    for page in (*range(0, 400, 2), 201):
        mapped[page * PAGE_BYTES] = 1
    told = ranges(mapped)
    assert told is not None
    assert len(told) == 199
    assert told[100] == (200 * PAGE_BYTES, 203 * PAGE_BYTES)


def test_a_kernel_that_does_not_tell_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError("not here")

    mapped = mapping(1)
    monkeypatch.setattr(os, "open", refuse)
    assert ranges(mapped) is None
    monkeypatch.undo()
    empty = tmp_path / "empty"
    empty.touch()
    monkeypatch.setattr(fcntl, "ioctl", refuse_to_scan)
    monkeypatch.setattr(os, "pread", lambda *_: b"")
    assert ranges(mapped) is None
