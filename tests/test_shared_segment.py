from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from raydist.utils import shared_segment as segments
from raydist.utils.shared_segment import Segment

SIZE = 1 << 16


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment.create_nameless(SIZE)
    yield made
    made.close()


def test_more_than_the_machine_has_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel ends processes to make room for files in memory."""
    monkeypatch.setattr(segments, "free_memory", lambda: SIZE - 1)
    monkeypatch.setattr(os, "posix_fallocate", pytest.fail)
    with pytest.raises(OSError, match="65,536 bytes are wanted, 65,535 are left") as caught:
        Segment.create_nameless(SIZE)
    assert caught.value.errno == errno.ENOSPC


def test_another_file_of_that_name_is_refused(segment: Segment) -> None:
    with pytest.raises(OSError, match="somebody else"):
        Segment.open(segment.name, SIZE, b"x" * 32)
    with pytest.raises(OSError, match=f"has {SIZE} bytes and should have {SIZE + 1}"):
        Segment.open(segment.name, SIZE + 1, segment.token)
    with pytest.raises(FileNotFoundError):
        Segment.open("raydist-shm-nowhere", SIZE, segment.token)


def test_a_place_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = num_descriptors()
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(OSError, match="No space left"):
        Segment.create_nameless(SIZE)
    assert num_descriptors() == before


def test_a_rank_is_seen_until_it_is_killed(segment: Segment) -> None:
    holding, held = os.pipe()
    child = os.fork()
    if child == 0:
        other = Segment.open(segment.name, SIZE, segment.token)
        other.hold(1)
        os.write(held, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(holding, 1)
    assert segment.holds(1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not segment.holds(1)
    os.close(holding)
    os.close(held)


def test_a_child_does_not_hold_for_its_parent(segment: Segment) -> None:
    holder = Segment.open(segment.name, SIZE, segment.token)
    holder.hold(1)
    begun, go_on = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(begun[1], b"x")
        os.read(go_on[0], 1)
        os._exit(0)
    os.read(begun[0], 1)
    holder.close()
    held = segment.holds(1)
    os.write(go_on[1], b"x")
    os.waitpid(child, 0)
    for descriptor in (*begun, *go_on):
        os.close(descriptor)
    assert not held


def test_a_file_without_a_name_is_found_through_its_process(segment: Segment) -> None:
    before = {path.name for path in Path("/dev/shm").iterdir()}
    other = Segment.open(segment.name, SIZE, segment.token)
    segment.view(4096, 1, torch.int64).fill_(7)
    assert other.view(4096, 1, torch.int64).item() == 7
    assert bytes(other.bytes()[4096:4104]) == b"\7" + bytes(7)
    assert other.view(0, 0, torch.float32).shape == (0,)
    assert {path.name for path in Path("/dev/shm").iterdir()} == before
    segment.hold(0)
    assert other.holds(0)
    segment.close()
    assert not other.holds(0)
    with pytest.raises(OSError):  # noqa: PT011  # what is there by then is up to the process
        Segment.open(segment.name, SIZE, segment.token)
    other.close()
    other.close()
    with pytest.raises(OSError, match="closed"):
        other.hold(1)


def num_descriptors() -> int:
    links = map(os.readlink, os.scandir("/proc/self/fd"))  # others come and go with threads of other tests
    with contextlib.suppress(FileNotFoundError):
        return sum("nameless" in link for link in links)
    return num_descriptors()
