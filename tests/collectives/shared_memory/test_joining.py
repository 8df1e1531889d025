from __future__ import annotations

import errno
import os
import platform
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from raydist.collectives.backend import Declined
from raydist.collectives.rendezvous.store import RendezvousStore
from raydist.collectives.shared_memory.joining import Meeting
from raydist.collectives.shared_memory.segment import DIRECTORY, Segment
from raydist.errors import CancelledError, DeadlineExceededError
from tests.collectives.threads import begin_threads


@pytest.fixture
def store() -> Iterator[RendezvousStore]:
    with RendezvousStore() as opened:
        yield opened


def meet(store: RendezvousStore, size: int, timeout_s: float = 10.0, generation: int = 0) -> dict[int, Any]:
    meetings = [
        Meeting(store.membership("g", generation=generation, rank=rank, world_size=size), timeout_s)
        for rank in range(size)
    ]
    return begin_threads({rank: meeting.join for rank, meeting in enumerate(meetings)})()


def declined(outcomes: dict[int, Any]) -> list[str]:
    assert all(isinstance(outcome, Declined) for outcome in outcomes.values()), outcomes
    return [str(outcome) for outcome in outcomes.values()]


def test_all_hold_one_segment_that_nobody_else_can_open(store: RendezvousStore) -> None:
    segments: dict[int, Segment] = meet(store, 3)
    assert len({segment.token for segment in segments.values()}) == 1
    for segment in segments.values():
        assert not (DIRECTORY / segment.name).exists()
        others = [rank for rank in range(3) if segments[rank] is not segment]
        assert all(segment.holds(rank) for rank in others)
    for segment in segments.values():
        segment.close()


def test_no_room_at_rank_0(store: RendezvousStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    reasons = declined(meet(store, 3))
    assert reasons == ["rank 0: no shared memory in /dev/shm: No space left on device"] * 3


def test_a_rank_that_sees_another_dev_shm(store: RendezvousStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(name: str, size: int, token: bytes) -> Segment:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(Segment, "open", staticmethod(elsewhere))
    reason = "no shared memory in /dev/shm: No such file or directory"
    assert declined(meet(store, 3)) == [f"rank 1: {reason}; rank 2: {reason}"] * 3


def test_a_machine_that_cannot(store: RendezvousStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    reasons = declined(meet(store, 2))
    assert "rank 0: it needs Linux on x86-64, and this is linux on aarch64" in reasons[0]
    assert reasons[0] == reasons[1]


def test_a_member_that_does_not_come(store: RendezvousStore) -> None:
    meeting = Meeting(store.membership("g", generation=0, rank=1, world_size=2), 0.2)
    with pytest.raises(DeadlineExceededError, match=r"timed out after 0\.2 s: rank 0 did not arrive"):
        meeting.join()


def test_a_member_that_dies_on_the_way(store: RendezvousStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(self: Meeting, *args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Meeting, "_open", die)
    outcomes = meet(store, 2, timeout_s=0.5)
    assert isinstance(outcomes[1], KeyboardInterrupt)
    assert isinstance(outcomes[0], DeadlineExceededError)
    assert "rank 1 did not arrive" in str(outcomes[0])


def test_abort_ends_the_wait(store: RendezvousStore) -> None:
    meeting = Meeting(store.membership("g", generation=0, rank=0, world_size=2), 30.0)
    timer = threading.Timer(0.1, meeting.abort)
    timer.start()
    start = time.monotonic()
    with pytest.raises(CancelledError, match="rendezvous by rank 0 of 2"):
        meeting.join()
    timer.join()
    assert time.monotonic() - start < 10.0
