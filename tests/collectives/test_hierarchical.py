"""Groups on several hosts: numbers of hosts and ranks, and ranks that are killed, stopped or abort."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import pytest
import torch

from raydist.collectives.base import Communicator, Membership
from raydist.collectives.hierarchical import HierarchicalBackend
from raydist.collectives.rendezvous import RendezvousStore
from raydist.collectives.shared_memory.communicator import SharedMemoryCommunicator
from raydist.core.errors import (
    DeadlineExceededError,
    UnavailableError,
)
from raydist.core.values import ReduceOp
from tests.cases import case
from tests.collectives.processes import Failing, ProcessTeam, stop_myself
from tests.collectives.shared_memory.operations import starting
from tests.collectives.threads import run_hosted, team_on
from tests.contracts import communicator as contract

pytestmark = pytest.mark.timeout(180)

SHAPES = ("ab", "abaa", "abc", "aabbbcc")
"""One letter a rank: its host. One rank each, fewer here than there, three hosts, three uneven ones."""


def test_one_host_shares_memory_and_unknown_hosts_are_declined() -> None:
    backend = HierarchicalBackend()
    assert "nobody has said" in str(backend.declines(Membership("g", 0, 0, 2)))
    assert backend.declines(Membership("g", 0, 0, 2, hosts=("a", "b"))) is None
    with team_on(HierarchicalBackend(), 2, "aa") as team:
        assert isinstance(team._groups[0], SharedMemoryCommunicator)


def test_hosts_of_all_shapes_keep_the_contract() -> None:
    for hosts in SHAPES:
        with case(hosts), team_on(HierarchicalBackend(), len(hosts), hosts) as team:
            for check in (contract.check_moves, contract.check_tensor_kinds, contract.check_rows):
                check(team)


def test_many_may_be_under_way() -> None:
    def many_at_once(communicator: Communicator) -> set[float]:
        """More than there are slots for."""
        tensors = [torch.ones(numel) for _ in range(20) for numel in (3, 20_000, 60_000)]
        works = [communicator.all_reduce(tensor, ReduceOp.SUM) for tensor in tensors]
        for work in works:
            work.wait()
        return {tensor.unique().item() for tensor in tensors}

    assert run_hosted("aab", many_at_once) == [{3.0}] * 3


def test_who_comes_alone_is_told_who_is_missing() -> None:
    with RendezvousStore() as store:
        membership = store.membership("g", generation=0, rank=1, world_size=3, hosts=("a", "b", "b"))
        with pytest.raises(DeadlineExceededError, match="rank 1 of 3 .* ranks 0, 2 did not arrive"):
            HierarchicalBackend().open(membership, torch.device("cpu"), 0.3)


def num_held() -> int:
    gc.collect()
    return len([path for path in Path("/proc/self/fd").iterdir() if os.path.lexists(path)])


def test_nothing_is_left_behind() -> None:
    run_hosted("abc", contract.sum_of_ones)
    before = num_held()
    for _ in range(2):
        run_hosted("abc", contract.sum_of_ones)
    deadline = time.monotonic() + 10.0  # gloo closes its sockets in a thread of its own
    while num_held() > before + 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert num_held() <= before + 1


def test_killed_ranks_and_hosts_are_noticed_at_once(hierarchical_team: ProcessTeam) -> None:
    team = hierarchical_team
    cases = [((0,), "broadcast"), ((1,), "all_gather"), ((2,), "all_reduce"), ((0, 2), "barrier")]
    for victims, name in cases:
        failing = Failing(starting(name, victims[0]))
        outcomes = team.begin({rank: failing for rank in range(team.world_size) if rank not in victims})
        time.sleep(0.2)
        killed = time.monotonic()
        for victim in victims:
            team.kill(victim)
        results = outcomes()
        took = time.monotonic() - killed
        with case(f"{victims} in {name}"):
            for _, error in results.values():
                assert isinstance(error, UnavailableError), error
                assert "No sign of rank" in str(error) or "gone" in str(error)
                assert str(victims[0]) in str(error).split("No sign of")[-1]
            assert took < 2.0
            team.reform()
            contract.check_asynchronous(team)


@pytest.mark.parametrize(
    ("victim", "name"), [pytest.param(0, "all_reduce small", marks=pytest.mark.long), (1, "all_reduce"), (2, "barrier")]
)
def test_a_stopped_rank_is_named_when_the_limit_is_over(hierarchical_team: ProcessTeam, victim: int, name: str) -> None:
    team = hierarchical_team
    resumed = team.begin({victim: stop_myself})
    others = [rank for rank in range(team.world_size) if rank != victim]
    outcomes = team.begin(dict.fromkeys(others, Failing(starting(name, victim))))()
    team.resume(victim)
    assert resumed() == {victim: None}
    for seconds, error in outcomes.values():
        assert isinstance(error, DeadlineExceededError), error
        assert f"No sign of rank {victim}." in str(error)
        assert seconds < team.timeout_s + 2.0
    team.reform()
    contract.check_asynchronous(team)


def test_a_neighbour_that_is_gone_is_noticed_where_the_leader_is_late() -> None:
    with team_on(HierarchicalBackend(), 4, "aaab") as team:
        outcomes = team.begin(dict.fromkeys((2, 3), Failing(starting("all_reduce small", 1))))
        time.sleep(0.1)
        team.kill(1)
        for seconds, error in outcomes().values():
            assert isinstance(error, UnavailableError), error
            assert "rank 1 is gone" in str(error)
            assert seconds < 10.0
