from __future__ import annotations

import pytest

from raydist.collectives.base import Membership
from raydist.collectives.hierarchical.plan import HostPlan, rounds


def plan_of(hosts: str, rank: int) -> HostPlan:
    return HostPlan.of(Membership("g", 0, rank, len(hosts), hosts=tuple(hosts)))


@pytest.mark.parametrize("hosts", ["ab", "ba", "aabb", "abab", "abaa", "abcbcc"])
def test_all_ranks_have_one_plan(hosts: str) -> None:
    plans = [plan_of(hosts, rank) for rank in range(len(hosts))]
    assert len({plan.hosts for plan in plans}) == 1
    assert sorted(rank for members in plans[0].hosts for rank in members) == list(range(len(hosts)))
    for rank, plan in enumerate(plans):
        assert plan.members[plan.place] == rank
        assert plan.host == plan.host_of(rank)
    assert [plan.members[0] for plan in plans if plan.leads] == [members[0] for members in plans[0].hosts]


def test_a_lane_has_a_rank_of_each_host() -> None:
    plans = [plan_of("abaabb", rank) for rank in range(6)]
    assert [plan.lane for plan in plans] == [0, 0, 1, 2, 1, 2]
    assert plans[2].lane_ranks == plans[4].lane_ranks == (2, 4)
    assert [plan_of("abaa", rank).lane for rank in range(4)] == [0, 0, None, None]
    assert plan_of("abaa", 3).lane_ranks == (3,)


@pytest.mark.parametrize("hosts", ["ab", "aabb", "abaa", "aaabbc"])
def test_everybody_is_received_once_on_every_other_host(hosts: str) -> None:
    plan = plan_of(hosts, 0)
    for rank in range(len(hosts)):
        for host, members in enumerate(plan.hosts):
            if rank not in members:
                assert plan.receiver(rank, host) in members


def test_receivers_share_the_work() -> None:
    plan = plan_of("aabbbb", 0)
    assert [plan.receiver(rank, 0) for rank in (2, 3, 4, 5)] == [0, 1, 0, 1]


def test_at_home_ranks_count_from_zero() -> None:
    membership = Membership("g", 4, 3, 4, "here", 1, b"s", ("a", "b", "a", "b"))
    home = HostPlan.of(membership).at_home(membership)
    assert home == Membership("g/host-1", 4, 1, 2, "here", 1, b"s")


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_a_round_is_a_permutation(count: int) -> None:
    plans = [rounds(count, host) for host in range(count)]
    for step in range(count - 1):
        assert sorted(plan[step][0] for plan in plans) == list(range(count))
        assert all(plans[plan[step][0]][step][1] == host for host, plan in enumerate(plans))
    for host, plan in enumerate(plans):
        assert sorted(to for to, _ in plan) == [other for other in range(count) if other != host]
