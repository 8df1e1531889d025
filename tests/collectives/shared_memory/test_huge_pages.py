from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from raydist.collectives.shared_memory.huge_pages import join_pages, map_aligned

HUGE = 2 << 20
SIZE = 3 * HUGE + 5000


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = os.memfd_create("huge-pages")
    os.posix_fallocate(made, 0, SIZE)
    yield made
    os.close(made)


def is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [[int(each, 16) for each in line.split()[0].split("-")] for line in lines]
    return any(begin <= address < end for begin, end in ranges)


def test_a_file_is_mapped_whole_at_a_multiple_of_2_mb(descriptor: int) -> None:
    one, other = map_aligned(descriptor, SIZE), map_aligned(descriptor, SIZE)
    assert len(one) == len(other) == SIZE
    for memory in (one, other):
        assert ctypes.addressof(memory) % HUGE == 0
    one[SIZE - 1] = 7
    assert other[SIZE - 1] == 7
    assert os.pread(descriptor, 1, SIZE - 1) == b"\7"


def test_it_stays_as_long_as_a_tensor_looks_into_it_and_nothing_stays_after(descriptor: int) -> None:
    memory = map_aligned(descriptor, SIZE)
    address = ctypes.addressof(memory)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)[HUGE:]
    del memory
    gc.collect()
    tensor.fill_(3)
    assert is_mapped(address)
    assert is_mapped(address + SIZE - 1)
    del tensor
    assert not is_mapped(address)
    assert not is_mapped(address + SIZE - 1)


def test_nothing_is_left_mapped_around_it(descriptor: int) -> None:
    def total() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")

    before = total()
    memory = map_aligned(descriptor, SIZE)
    assert total() - before < SIZE + HUGE // 2
    del memory


def test_what_lies_there_stays(descriptor: int) -> None:
    memory, other = map_aligned(descriptor, SIZE), map_aligned(descriptor, SIZE)
    content = torch.randint(256, (SIZE,), dtype=torch.uint8)
    torch.frombuffer(memory, dtype=torch.uint8).copy_(content)
    join_pages(ctypes.addressof(memory), SIZE)  # perhaps in vain
    for each in (memory, other):
        assert torch.equal(torch.frombuffer(each, dtype=torch.uint8), content)
    memory[HUGE] = 9
    assert other[HUGE] == 9


def test_less_than_a_huge_page_is_left_as_it_is(descriptor: int) -> None:
    memory = map_aligned(descriptor, SIZE)
    assert not join_pages(ctypes.addressof(memory), HUGE - 1)
    assert not join_pages(ctypes.addressof(memory) + 4096, HUGE)


def test_what_cannot_be_mapped_is_told(tmp_path: Path) -> None:
    with (tmp_path / "unwritable").open("wb") as file:
        file.write(bytes(10))
    descriptor = os.open(tmp_path / "unwritable", os.O_RDONLY)
    with pytest.raises(OSError, match="10 bytes cannot be mapped: Permission denied"):
        map_aligned(descriptor, 10)
    os.close(descriptor)
