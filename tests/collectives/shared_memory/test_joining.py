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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raydist.collectives.base import Communicator, Declined, Membership
from raydist.collectives.rendezvous import RendezvousStore
from raydist.collectives.shared_memory.communicator import join
from raydist.collectives.shared_memory.control import Futex, why_unsupported
from raydist.core.errors import DeadlineExceededError
from raydist.utils.shared_segment import Segment
from tests.collectives.processes import START_S, ProcessTeam
from tests.collectives.shared_memory.test_faults import Rounds
from tests.collectives.threads import begin_threads
from tests.fork_server import fork_server

pytestmark = pytest.mark.timeout(180)
SIZE = 1 << 16


@pytest.fixture
def store() -> Iterator[RendezvousStore]:
    with RendezvousStore() as opened:
        yield opened


def joining(store: RendezvousStore, rank: int, size: int, timeout_s: float = 10.0) -> Callable[[], Any]:
    membership = store.membership("g", generation=0, rank=rank, world_size=size)
    return functools.partial(join, membership, 0, SIZE, timeout_s)


def meet(store: RendezvousStore, size: int, timeout_s: float = 10.0) -> dict[int, Any]:
    return begin_threads({rank: joining(store, rank, size, timeout_s) for rank in range(size)})()


MUST = "every rank must map the segment, got "


def declined(outcomes: dict[int, Any]) -> list[str]:
    assert all(isinstance(outcome, Declined) for outcome in outcomes.values()), outcomes
    return [str(outcome) for outcome in outcomes.values()]


def test_no_room_at_rank_0(store: RendezvousStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    assert declined(meet(store, 3)) == [f"{MUST}rank 0: no shared memory: No space left on device"] * 3


def test_ranks_that_cannot_open_the_segment(store: RendezvousStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(name: str, size: int, token: bytes) -> Segment:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(Segment, "open", staticmethod(elsewhere))
    reason = "no shared memory: No such file or directory"
    assert declined(meet(store, 3)) == [f"{MUST}rank 1: {reason}; rank 2: {reason}"] * 3


def test_a_member_that_fails_on_the_way(store: RendezvousStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Segment, "accept", fail)
    outcomes = meet(store, 2, timeout_s=0.5)
    assert isinstance(outcomes[1], KeyboardInterrupt)
    assert isinstance(outcomes[0], DeadlineExceededError)
    assert "rank 1 did not arrive" in str(outcomes[0])


# --- what is left behind ----------------------------------------------------------------------------------------------


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
    for _ in range(3):
        shm_team.reform()
        shm_team.run(Rounds(0, by_s=0.0))
    assert shm_team.run(number_held) == first


def join_first(membership: Membership) -> None:
    join(membership, 0, SIZE, START_S)


def test_a_rank_that_is_killed_while_joining_leaves_no_file(store: RendezvousStore) -> None:
    """The segment is a memfd: no file has a name that anybody would have to remove."""
    before = {path.name for path in Path("/dev/shm").glob("raydist-shm-*")}  # looked at only
    first = store.membership("g", generation=0, rank=0, world_size=2)
    process = fork_server().Process(target=join_first, args=(first,), daemon=True)
    process.start()
    second = joining(store, 1, 2, 60.0)
    thread = threading.Thread(target=lambda: begin_threads({1: second})(), daemon=True)
    thread.start()
    thread.join(START_S)
    process.kill()
    process.join(START_S)
    assert {path.name for path in Path("/dev/shm").glob("raydist-shm-*")} <= before  # looked at only


# --- futex ------------------------------------------------------------------------------------------------------------


def make_bell() -> tuple[ctypes.c_uint32, Futex]:
    word = ctypes.c_uint32(0)
    return word, Futex(ctypes.addressof(word))


def test_ringing_wakes_all_sleepers() -> None:
    word, futex = make_bell()
    sleepers = [threading.Thread(target=futex.sleep, args=(0, 30.0)) for _ in range(3)]
    for sleeper in sleepers:
        sleeper.start()
    time.sleep(0.05)
    futex.ring()
    for sleeper in sleepers:
        sleeper.join(5.0)
    assert not any(sleeper.is_alive() for sleeper in sleepers)
    assert word.value == 1


def test_a_sleep_ends() -> None:
    word, futex = make_bell()
    start = time.monotonic()
    futex.sleep(0, 0.05)
    futex.sleep(0, -1.0)
    futex.yield_core()
    assert 0.04 < time.monotonic() - start < 5.0
    assert word.value == 0


@pytest.mark.parametrize(("system", "machine"), [("linux", "aarch64"), ("darwin", "x86_64")])
def test_machines_that_promise_less(monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    assert why_unsupported() is None
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert why_unsupported() == f"it needs Linux on x86-64, and this is {system} on {machine}"
