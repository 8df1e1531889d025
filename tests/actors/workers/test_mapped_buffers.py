from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from raydist.actors.workers import worker
from raydist.actors.workers.shared_buffers import SharedBuffer
from raydist.actors.workers.worker import MappedBuffers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files without a name are Linux's")


def test_both_sides_see_the_same_memory_and_it_is_mapped_once() -> None:
    buffer = SharedBuffer.create(1 << 16)
    buffers = MappedBuffers()
    memory = buffers.get(buffer.address)
    assert memory is not None
    memory[1000:1003] = b"abc"
    assert buffer.memory[1000:1003] == b"abc"
    assert buffers.get(buffer.address) is memory


def test_what_is_another_file_there_is_not_mapped(tmp_path: Path) -> None:
    buffer = SharedBuffer.create(1 << 16)
    address = buffer.address
    with (tmp_path / "raydist-results").open("wb+") as file:
        file.truncate(1 << 16)
        for other in (
            replace(address, token=b"another's token!"),
            replace(address, num_bytes=1 << 17),
            replace(address, fd=9999),
            replace(address, pid=2**22 + 1),
            replace(address, fd=file.fileno()),
            replace(address, fd=0),
        ):
            assert MappedBuffers().get(other) is None, other


def test_the_last_ones_used_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_MOST_MAPPED", 2)
    made = [SharedBuffer.create(1 << 16) for _ in range(3)]
    buffers = MappedBuffers()
    first = buffers.get(made[0].address)
    for buffer in (made[1], made[0], made[2]):
        assert buffers.get(buffer.address) is not None
    assert buffers.get(made[0].address) is first
    assert list(buffers._known) == [made[2].address.token, made[0].address.token]


def test_no_file_stays_open_for_a_mapping() -> None:
    buffer = SharedBuffer.create(1 << 16)
    before = set(os.listdir("/proc/self/fd"))
    assert MappedBuffers().get(buffer.address) is not None
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 1  # mmap keeps one of its own until it goes
