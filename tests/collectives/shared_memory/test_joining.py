"""Joining a group in shared memory: who can map the segment, and what is left behind: nothing."""

from __future__ import annotations

import ctypes
import errno
import functools
import gc
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raydist.collectives.base import Communicator, Declined
from raydist.collectives.rendezvous import RendezvousStore
from raydist.collectives.shared_memory.communicator import join
from raydist.collectives.shared_memory.control import Futex, why_unsupported
from raydist.core.errors import DeadlineExceededError
from raydist.utils.shared_segment import Segment
from tests.collectives.processes import ProcessTeam
from tests.collectives.shared_memory.test_faults import Rounds
from tests.collectives.threads import begin_threads

pytestmark = pytest.mark.timeout(180)
SIZE = 1 << 16


@pytest.fixture
def store() -> Iterator[RendezvousStore]:
    with RendezvousStore() as opened:
        yield opened


def meet(store: RendezvousStore, size: int, timeout_s: float) -> dict[int, Any]:
    members = [store.membership("g", generation=0, rank=rank, world_size=size) for rank in range(size)]
    return begin_threads({one.rank: functools.partial(join, one, 0, SIZE, timeout_s) for one in members})()


def test_ranks_that_cannot_open_the_segment(store: RendezvousStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(name: str, size: int, token: bytes) -> Segment:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(Segment, "open", staticmethod(elsewhere))
    reason = "no shared memory: No such file or directory"
    for outcome in meet(store, 3, 10.0).values():
        assert isinstance(outcome, Declined), outcome
        assert str(outcome) == f"every rank must map the segment, got rank 1: {reason}; rank 2: {reason}"


def test_a_member_that_fails_on_the_way(store: RendezvousStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Segment, "accept", fail)
    outcomes = meet(store, 2, timeout_s=0.5)
    assert isinstance(outcomes[1], KeyboardInterrupt)
    assert isinstance(outcomes[0], DeadlineExceededError)
    assert "rank 1 did not arrive" in str(outcomes[0])


def what_is_held() -> set[str]:
    """Return the segments of which this process has a descriptor or a mapping."""
    gc.collect()
    descriptors = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    mappings = Path("/proc/self/maps").read_text().split()
    return {name for name in (*descriptors, *mappings) if "raydist-shm" in name}


def number_held(communicator: Communicator) -> int:
    return len(what_is_held())


def test_a_new_generation_leaves_nothing_of_the_last(shm_team: ProcessTeam) -> None:
    shm_team.reform()
    shm_team.run(Rounds(0, by_s=0.0))
    first = shm_team.run(number_held)
    for _ in range(2):
        shm_team.reform()
        shm_team.run(Rounds(0, by_s=0.0))
    assert shm_team.run(number_held) == first


def test_ringing_wakes_all_sleepers_and_a_sleep_ends() -> None:
    word = ctypes.c_uint32(0)
    futex = Futex(ctypes.addressof(word))
    sleepers = [threading.Thread(target=futex.sleep, args=(0, 30.0)) for _ in range(3)]
    for sleeper in sleepers:
        sleeper.start()
    time.sleep(0.05)
    futex.ring()
    for sleeper in sleepers:
        sleeper.join(5.0)
    assert not any(sleeper.is_alive() for sleeper in sleepers)
    assert word.value == 1
    start = time.monotonic()
    futex.sleep(1, 0.05)
    futex.sleep(1, -1.0)
    futex.yield_core()
    assert 0.04 < time.monotonic() - start < 5.0
    assert word.value == 1


def test_machines_that_promise_less(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_unsupported() is None
    for system, machine in (("linux", "aarch64"), ("darwin", "x86_64")):
        monkeypatch.setattr(sys, "platform", system)
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        assert why_unsupported() == f"it needs Linux on x86-64, and this is {system} on {machine}"
