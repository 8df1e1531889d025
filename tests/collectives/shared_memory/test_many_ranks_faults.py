"""A rank that is killed or stopped among so many that what they reduce goes through bays: each of the others is told.

Ranks 0 to 7 have what they brought added up by whoever of them comes last; rank 8 is a group of its own, so that it
alone adds up what it brought.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from raydist.collectives.base import Communicator
from raydist.collectives.reducing import reduce_rows
from raydist.collectives.shared_memory import bays
from raydist.errors import DeadlineExceededError, UnavailableError
from raydist.values import ReduceOp
from tests.collectives.faults import Failing
from tests.collectives.processes import ProcessTeam
from tests.collectives.shared_memory.operations import Begun, summed

pytestmark = pytest.mark.timeout(180)

MANY = 9
NUMEL = 4000  # neither small enough for slots nor too large for bays


@pytest.fixture(scope="module")
def large_team() -> Iterator[ProcessTeam]:
    with ProcessTeam(MANY, timeout_s=2.0, backend="shm") as team:
        yield team


def through_bays(communicator: Communicator) -> Begun:
    return summed(communicator, 0, NUMEL)


def is_summed(communicator: Communicator) -> bool:
    return through_bays(communicator).wait()


class Before:
    """A signal to this rank itself before it brings anything."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def __call__(self, communicator: Communicator) -> None:
        os.kill(os.getpid(), self.number)


class AddingUp(Before):
    """The same once it has brought its part, and is about to add up."""

    def __call__(self, communicator: Communicator) -> None:
        with mock.patch.object(bays, "reduce_rows", self.interrupted):
            through_bays(communicator)

    def interrupted(self, rows: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        if len(rows) == 1:  # its own, not the subtotals
            os.kill(os.getpid(), self.number)
        return reduce_rows(rows, op)


WHEN: list[tuple[int, type[Before]]] = [(3, Before), (8, Before), (8, AddingUp)]
moments = pytest.mark.parametrize(("victim", "moment"), WHEN)


def all_but(victim: int) -> list[int]:
    return [rank for rank in range(MANY) if rank != victim]


@moments
def test_every_survivor_of_a_killed_rank_is_told_who_is_gone(
    large_team: ProcessTeam, victim: int, moment: type[Before]
) -> None:
    large_team.begin({victim: moment(signal.SIGKILL)})
    outcomes = large_team.begin(dict.fromkeys(all_but(victim), Failing(through_bays)))()
    large_team.kill(victim)
    for seconds, error in outcomes.values():
        assert isinstance(error, UnavailableError), error
        assert f"rank {victim} is gone" in str(error)
        assert seconds < large_team.timeout_s * 0.9
    large_team.reform()
    assert large_team.run(is_summed) == [True] * MANY


@moments
def test_everybody_is_told_who_has_stopped_when_the_limit_is_over(
    large_team: ProcessTeam, victim: int, moment: type[Before]
) -> None:
    resumed = large_team.begin({victim: moment(signal.SIGSTOP)})
    outcomes = large_team.begin(dict.fromkeys(all_but(victim), Failing(through_bays)))()
    large_team.resume(victim)
    assert resumed() == {victim: None}
    for seconds, error in outcomes.values():
        assert isinstance(error, DeadlineExceededError), error
        assert f"No sign of rank {victim}." in str(error)
        assert seconds < large_team.timeout_s + 2.0
    large_team.reform()
    assert large_team.run(is_summed) == [True] * MANY


def bring(communicator: Communicator) -> None:
    through_bays(communicator)


def test_a_rank_that_dies_once_it_has_brought_its_part_is_not_missed(large_team: ProcessTeam) -> None:
    assert large_team.begin({3: bring})() == {3: None}
    large_team.kill(3)
    assert large_team.begin(dict.fromkeys(all_but(3), is_summed))() == dict.fromkeys(all_but(3), True)
    large_team.reform()
