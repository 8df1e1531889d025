"""A rank that is killed or stopped, and a host whose ranks are all killed, inside operations of a group of two hosts.

Ranks 0 and 2 are on host a, rank 1 on host b: so 0 and 1 lead, and 2 speaks to nobody outside.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from raydist.collectives.base import Communicator
from raydist.errors import CancelledError, DeadlineExceededError, UnavailableError
from raydist.values import ReduceOp
from tests.collectives.faults import AbortingSoon, Begun, Failing, stop_myself
from tests.collectives.hierarchical.ranks import hosted_team
from tests.collectives.processes import ProcessTeam
from tests.collectives.shared_memory import operations
from tests.contracts import communicator as contract

pytestmark = pytest.mark.timeout(180)

LARGE = 300_000
# Larger than what the kernel keeps of a message that nobody takes.
HUGE = 5_000_000

Operation = Callable[[Communicator], Begun]


def small(communicator: Communicator) -> Begun:
    return communicator.all_reduce(torch.ones(3), ReduceOp.SUM)


def large(communicator: Communicator) -> Begun:
    return communicator.all_reduce(torch.ones(LARGE), ReduceOp.MEAN)


def scattered(communicator: Communicator) -> Begun:
    inputs = [torch.ones(LARGE) for _ in range(communicator.world_size)]
    return communicator.reduce_scatter(torch.ones(LARGE), inputs, ReduceOp.SUM)


def gathered(communicator: Communicator) -> Begun:
    return communicator.all_gather([torch.ones(LARGE) for _ in range(communicator.world_size)], torch.ones(LARGE))


def swapped(communicator: Communicator) -> Begun:
    outputs, inputs = ([torch.ones(LARGE) for _ in range(communicator.world_size)] for _ in range(2))
    return communicator.all_to_all(outputs, inputs)


def met(communicator: Communicator) -> Begun:
    return operations.Begun(communicator.barrier)


class Told:
    """By a rank that does not come."""

    def __init__(self, root: int) -> None:
        self.root = root
        self.__name__ = f"told by {root}"

    def __call__(self, communicator: Communicator) -> Begun:
        return communicator.broadcast(torch.ones(LARGE), self.root)


class Received:
    def __init__(self, source: int) -> None:
        self.source = source

    def __call__(self, communicator: Communicator) -> Begun:
        return communicator.recv(torch.ones(3), self.source)


class Sent:
    def __init__(self, destination: int) -> None:
        self.destination = destination

    def __call__(self, communicator: Communicator) -> Begun:
        return communicator.send(torch.ones(HUGE), self.destination)


COLLECTIVES: tuple[Operation, ...] = (small, large, scattered, gathered, swapped, Told(2), met)


def name_of(value: object) -> str:
    """Of an operation, and of ranks."""
    return str(value) if isinstance(value, tuple | int) else getattr(value, "__name__", type(value).__name__)


@pytest.mark.parametrize(
    ("victims", "operation"),
    [
        ((0,), large),
        ((1,), small),
        ((1,), swapped),
        ((1,), gathered),
        *(((2,), operation) for operation in COLLECTIVES),
        ((0,), Told(0)),
        ((0,), met),
        ((0, 2), large),
        ((0, 2), met),
    ],
    ids=name_of,
)
def test_killed_ranks_and_hosts_are_noticed_at_once(
    hierarchical_team: ProcessTeam, victims: tuple[int, ...], operation: Operation
) -> None:
    team = hierarchical_team
    outcomes = team.begin({rank: Failing(operation) for rank in range(team.world_size) if rank not in victims})
    time.sleep(0.2)
    killed = time.monotonic()
    for victim in victims:
        team.kill(victim)
    results = outcomes()
    took = time.monotonic() - killed
    for _, error in results.values():
        assert isinstance(error, UnavailableError), error
        assert "gone" in str(error)
        assert any(f"rank {victim}" in str(error).split("failed: ")[-1] for victim in victims)
    assert took < team.timeout_s  # 0.1 s where nobody else wants the cores
    team.reform()
    contract.check_asynchronous(team)


@pytest.mark.parametrize(
    ("victim", "operation"),
    [
        (0, small),
        (0, large),
        (1, large),
        (1, Told(1)),
        (2, large),
        (2, Told(0)),
        (2, met),
        # The limit each, for waits that are much like those.
        *(pytest.param(0, operation, marks=pytest.mark.long) for operation in (gathered, Told(0))),
        *(pytest.param(1, operation, marks=pytest.mark.long) for operation in (small, met)),
        *(pytest.param(2, operation, marks=pytest.mark.long) for operation in (small, gathered, Told(2))),
    ],
    ids=name_of,
)
def test_a_stopped_rank_is_named_when_the_limit_is_over(
    hierarchical_team: ProcessTeam, victim: int, operation: Operation
) -> None:
    team = hierarchical_team
    resumed = team.begin({victim: stop_myself})
    others = [rank for rank in range(team.world_size) if rank != victim]
    outcomes = team.begin(dict.fromkeys(others, Failing(operation)))()
    team.resume(victim)
    assert resumed() == {victim: None}
    for seconds, error in outcomes.values():
        assert isinstance(error, DeadlineExceededError)
        assert f"No sign of rank {victim}." in str(error)
        assert seconds < team.timeout_s + 2.0
    team.reform()
    contract.check_asynchronous(team)


@pytest.mark.parametrize("awaited", [Told(1), Received(1), Sent(1)], ids=name_of)
def test_who_waits_for_one_rank_of_another_host_does_not_wait_for_ever(awaited: Operation) -> None:
    with hosted_team("aba", timeout_s=1.0) as team:
        outcomes = team.begin(dict.fromkeys((0, 2), Failing(awaited)))
        time.sleep(0.1)
        team.kill(1)
        for _, error in outcomes().values():
            assert isinstance(error, UnavailableError | DeadlineExceededError), error
            assert "rank 1" in str(error)


@pytest.mark.parametrize("operation", [small, large, met], ids=name_of)
def test_a_neighbour_that_is_gone_is_noticed_where_the_leader_is_late(operation: Operation) -> None:
    with hosted_team("aaab") as team:
        outcomes = team.begin(dict.fromkeys((2, 3), Failing(operation)))
        time.sleep(0.1)
        team.kill(1)
        for seconds, error in outcomes().values():
            assert isinstance(error, UnavailableError), error
            assert "rank 1 is gone" in str(error)
            assert seconds < 10.0


@pytest.mark.parametrize("operation", COLLECTIVES, ids=name_of)
def test_an_abort_wakes_everybody(hierarchical_team: ProcessTeam, operation: Operation) -> None:
    outcomes = hierarchical_team.begin({0: Failing(operation), 1: AbortingSoon(operation)})()
    for seconds, error in outcomes.values():
        assert isinstance(error, CancelledError)
        assert "rank 1 aborted group" in str(error)
        assert seconds < hierarchical_team.timeout_s * 0.9
    hierarchical_team.reform()
    contract.check_asynchronous(hierarchical_team)
