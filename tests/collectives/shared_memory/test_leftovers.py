"""What a group in shared memory leaves behind: nothing, or what whoever comes next removes."""

from __future__ import annotations

import functools
import gc
import os
import signal
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

import pytest

from raydist.collectives.base import Communicator, Membership
from raydist.collectives.bulletin import Bulletin
from raydist.collectives.rendezvous.store import RendezvousStore, connect_store
from raydist.collectives.shared_memory.awaited_members import AwaitedMembers
from raydist.collectives.shared_memory.comparing import ComparingCommunicator
from raydist.collectives.shared_memory.joining import Meeting
from raydist.collectives.shared_memory.segment import DIRECTORY
from raydist.errors import UnavailableError
from tests.collectives.faults import Failing
from tests.collectives.processes import START_S, ProcessTeam
from tests.collectives.shared_memory.operations import COLLECTIVES
from tests.collectives.shared_memory.ranks import run_sharing
from tests.collectives.shared_memory.test_late_ranks import EVERYTHING, Rounds
from tests.collectives.threads import begin_threads
from tests.fork_server import fork_server
from tests.shared_files import left_behind, shared_files

pytestmark = pytest.mark.timeout(180)


def what_is_held() -> set[str]:
    """Segments of which this process has a descriptor or a mapping."""
    gc.collect()
    descriptors = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    mappings = Path("/proc/self/maps").read_text().split()
    return {name for name in (*descriptors, *mappings) if "raydist-shm" in name}


def test_close_leaves_nothing() -> None:
    # That no file is left, the fixture of all tests sees to.
    before = what_is_held()
    assert run_sharing(3, Rounds(0, by_s=0.0)) == [EVERYTHING] * 3
    assert what_is_held() <= before


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


# --- rank 0 is killed while a file of its own has a name --------------------------------------------------------------


def let_it_be_old(name: str) -> None:
    os.utime(DIRECTORY / name, (1.0, 1.0))  # what is younger than a minute may be of a group that still meets


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_while_allocating(communicator: Communicator) -> None:
    """Once all know the file."""
    with mock.patch.object(ComparingCommunicator, "all_reduce", die):
        COLLECTIVES["allocate"].start(communicator, 0).wait()


def test_a_file_of_a_rank_that_died_while_allocating_is_removed_by_the_next_generation(shm_team: ProcessTeam) -> None:
    shm_team.reform()
    before = shared_files()
    shm_team.begin({0: die_while_allocating})
    allocate = functools.partial(COLLECTIVES["allocate"].start, about=0)
    for _, error in shm_team.begin(dict.fromkeys((1, 2), Failing(allocate)))().values():
        assert isinstance(error, UnavailableError), error
        assert "rank 0 is gone" in str(error)
    shm_team.kill(0)
    (left,) = left_behind(before, within_s=0.3)
    let_it_be_old(left)
    shm_team.reform()
    assert not (DIRECTORY / left).exists()


def join(membership: Membership) -> None:
    Meeting(membership, START_S).join()


def joining(membership: Membership) -> BaseProcess:
    process = fork_server().Process(target=join, args=(membership,), daemon=True)
    process.start()
    return process


def test_a_file_of_a_rank_that_died_while_joining_is_removed_by_the_next_group() -> None:
    with RendezvousStore() as store:
        first, second = (store.membership("g", generation=0, rank=rank, world_size=2) for rank in range(2))
        process = joining(first)
        client, awaited = connect_store(second, START_S), AwaitedMembers(second, START_S)
        awaited.arrive(Bulletin(client, second))
        left = client.get("segment/offer").decode().split(" ")[0]  # which it says once it has made the file
        process.kill()
        process.join(START_S)
        assert (DIRECTORY / left).exists()
        let_it_be_old(left)
        again = [store.membership("g", generation=1, rank=rank, world_size=2) for rank in range(2)]
        segments = begin_threads({one.rank: Meeting(one, 10.0).join for one in again})()
        for segment in segments.values():
            segment.close()
        assert not (DIRECTORY / left).exists()
