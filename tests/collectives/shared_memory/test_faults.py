"""Ranks that are late, killed or stopped, or give up, in every operation in shared memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from raydist.collectives.base import Communicator
from raydist.core.errors import CancelledError, DeadlineExceededError, UnavailableError
from raydist.core.values import ReduceOp
from tests.collectives.processes import AbortingSoon, Failing, ProcessTeam, stop_myself
from tests.collectives.shared_memory.operations import COLLECTIVES, WITH_A_MIDDLE, Operation, starting
from tests.contracts import communicator as contract

pytestmark = pytest.mark.timeout(180)


class Rounds:
    """Every operation once; those that gave what they should. One rank is late to each of them."""

    def __init__(self, late: int, by_s: float = 0.1) -> None:
        self.late = late
        self.by_s = by_s

    def __call__(self, communicator: Communicator) -> list[str]:
        return [name for name, operation in COLLECTIVES.items() if self._is_right(communicator, operation)]

    def _is_right(self, communicator: Communicator, operation: Operation) -> bool:
        if communicator.rank == self.late:
            time.sleep(self.by_s)
        return operation.start(communicator, self.late).wait()


def test_a_rank_that_is_late_to_everything_is_waited_for(shm_team: ProcessTeam) -> None:
    shm_team.reform()
    for late in (0, 1):
        assert shm_team.run(Rounds(late)) == [list(COLLECTIVES)] * shm_team.world_size, late


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


MEETS_FIRST = ("allocate", "all_reduce in place")
"""All ranks meet before the victim can be where it is to be killed."""


class Coming:
    """The victim's part: what others need for the operation to begin, and the first half of it where it enters it."""

    def __init__(self, name: str, *, entered: bool, stops: bool = False) -> None:
        self.name = name
        self.entered = entered
        self.stops = stops

    def __call__(self, communicator: Communicator) -> None:
        COLLECTIVES[self.name].come(communicator, communicator.rank, entered=self.entered)
        if self.stops:
            stop_myself(communicator)


def all_but(team: ProcessTeam, victim: int) -> list[int]:
    return [rank for rank in range(team.world_size) if rank != victim]


Case = tuple[int, str, bool]
"""Victim, operation, and whether the victim has entered it."""

# One for each way to wait: for the begin of a collective, for reduced slices, for parts, for memory.
KILLED_OFTEN: list[Case] = [
    (2, "all_reduce small", False),
    (2, "all_reduce in place", False),
    (0, "all_reduce", True),
    (0, "all_gather_rows", True),
    (0, "allocate", True),
]
KILLED: list[Case] = [(victim, name, False) for name in COLLECTIVES for victim in (0, 2)]
KILLED += [(victim, name, True) for name in WITH_A_MIDDLE for victim in (0, 2)]


def cases(every: Sequence[Case], often: Sequence[Case]) -> list[Any]:
    return [pytest.param(*each, marks=[] if each in often else pytest.mark.long) for each in every]


@pytest.mark.parametrize(("victim", "name", "entered"), cases(KILLED, KILLED_OFTEN))
def test_a_killed_rank_is_named_at_once(shm_team: ProcessTeam, victim: int, name: str, entered: bool) -> None:
    shm_team.reform()
    came = shm_team.begin({victim: Coming(name, entered=entered)})
    if name not in MEETS_FIRST:
        assert came() == {victim: None}  # nobody else is there: it cannot get further than the middle
    outcomes = shm_team.begin(dict.fromkeys(all_but(shm_team, victim), Failing(starting(name, victim))))
    if name in MEETS_FIRST:
        assert came() == {victim: None}
    time.sleep(0.1)  # the others are asleep in it by then
    killed = time.monotonic()
    shm_team.kill(victim)
    results = outcomes()
    took = time.monotonic() - killed
    for _, error in results.values():
        if isinstance(error, DeadlineExceededError):  # a slow machine took longer to kill the rank
            assert f"No sign of rank {victim}" in str(error)
            continue
        assert isinstance(error, UnavailableError), error
        assert f"rank {victim} is gone" in str(error)
    assert took < shm_team.timeout_s  # 0.05 s where nobody else wants the cores
    shm_team.reform()
    contract.check_asynchronous(shm_team)


# Two seconds each: who has not entered a large one is waited for as in a small one, and the waits inside are few.
STOPPED: list[Case] = [(2, name, False) for name in COLLECTIVES if f"{name} small" not in COLLECTIVES]
STOPPED += [(0, name, True) for name in WITH_A_MIDDLE]


@pytest.mark.parametrize(("victim", "name", "entered"), cases(STOPPED, KILLED_OFTEN[1:3]))
def test_a_stopped_rank_is_named_when_the_limit_is_over(
    shm_team: ProcessTeam, victim: int, name: str, entered: bool
) -> None:
    shm_team.reform()
    resumed = shm_team.begin({victim: Coming(name, entered=entered, stops=True)})
    if name not in MEETS_FIRST:
        shm_team.await_stopped(victim)
    outcomes = shm_team.begin(dict.fromkeys(all_but(shm_team, victim), Failing(starting(name, victim))))()
    shm_team.resume(victim)
    assert resumed() == {victim: None}
    for seconds, error in outcomes.values():
        assert isinstance(error, DeadlineExceededError), error
        assert f"No sign of rank {victim}." in str(error)
        assert seconds < shm_team.timeout_s + 2.0
    shm_team.reform()
    contract.check_asynchronous(shm_team)


@pytest.mark.parametrize("name", ["all_reduce in place", "all_gather_rows", "allocate"])
def test_an_abort_wakes_everybody(shm_team: ProcessTeam, name: str) -> None:
    shm_team.reform()
    came = shm_team.begin({2: Coming(name, entered=False)})
    outcomes = shm_team.begin({0: Failing(starting(name, 2)), 1: AbortingSoon(starting(name, 2))})()
    assert came() == {2: None}
    for seconds, error in outcomes.values():
        assert isinstance(error, CancelledError), error
        assert "rank 1 aborted group" in str(error)
        assert seconds < shm_team.timeout_s * 0.9
    shm_team.reform()
    contract.check_asynchronous(shm_team)
