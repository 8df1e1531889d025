"""A rank that is late to every operation of a group in shared memory is waited for; and what it costs to wait."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from raydist.collectives.base import Communicator
from raydist.values import ReduceOp
from tests.collectives.processes import ProcessTeam
from tests.collectives.shared_memory.operations import COLLECTIVES, Operation

pytestmark = pytest.mark.timeout(180)


class Rounds:
    """Every operation once; those that gave what they should. One rank is late to each of them."""

    def __init__(self, late: int, by_s: float = 0.1) -> None:
        self.late = late
        self.by_s = by_s

    def __call__(self, communicator: Communicator) -> list[str]:
        return [name for name in COLLECTIVES if self._is_right(communicator, COLLECTIVES[name])]

    def _is_right(self, communicator: Communicator, operation: Operation) -> bool:
        self._be_late(communicator)
        return operation.start(communicator, self.late).wait()

    def _be_late(self, communicator: Communicator) -> None:
        if communicator.rank == self.late:
            time.sleep(self.by_s)


EVERYTHING = list(COLLECTIVES)


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_is_late_to_everything_is_waited_for(shm_team: ProcessTeam, late: int) -> None:
    shm_team.reform()
    assert shm_team.run(Rounds(late)) == [EVERYTHING] * shm_team.world_size


def cpu_seconds_while_waiting(communicator: Communicator) -> float:
    before = time.process_time()
    communicator.all_reduce(torch.ones(3), ReduceOp.SUM).wait()
    return time.process_time() - before


def sleep_first(communicator: Communicator) -> None:
    time.sleep(0.5)
    communicator.all_reduce(torch.ones(3), ReduceOp.SUM).wait()


def test_waiting_takes_no_cpu(shm_team: ProcessTeam) -> None:
    shm_team.reform()
    results = shm_team.begin({0: cpu_seconds_while_waiting, 1: cpu_seconds_while_waiting, 2: sleep_first})()
    assert max(results[0], results[1]) < 0.1


def number_of_threads(communicator: Communicator) -> tuple[int, int]:
    before = threading.active_count()
    for operation in COLLECTIVES.values():
        assert operation.start(communicator, 0).wait()
    return before, threading.active_count()


def test_nothing_runs_in_the_background(shm_team: ProcessTeam) -> None:
    shm_team.reform()
    assert all(after <= before for before, after in shm_team.run(number_of_threads))
