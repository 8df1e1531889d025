from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from raydist.collectives.base import Membership
from raydist.collectives.process_group import GlooBackend
from raydist.collectives.rendezvous import RendezvousStore, connect_store
from raydist.collectives.xla.communicator import CallComparison
from raydist.errors import CollectiveMismatchError
from tests.collectives.threads import begin_threads


def compared(membership: Membership) -> CallComparison:
    store = connect_store(membership, 10.0)
    return CallComparison(membership, store, GlooBackend().create(store, membership, 10.0))


@pytest.fixture
def two() -> Iterator[list[CallComparison]]:
    with RendezvousStore() as store:
        members = [store.membership("g", generation=0, rank=rank, world_size=2) for rank in (0, 1)]
        made: Any = begin_threads({one.rank: functools.partial(compared, one) for one in members})()
        ranks: list[CallComparison] = [made[0], made[1]]
        yield ranks
        for rank in ranks:
            rank.close()
            rank.close()


def soon() -> float:
    return time.monotonic() + 0.05


def later() -> float:
    return time.monotonic() + 5.0


def test_nobody_goes_on_alone(two: list[CallComparison]) -> None:
    assert not two[0].all_agree(soon())  # nothing was announced
    two[0].announce("sum")
    assert not two[0].all_agree(soon())
    two[1].announce("sum")
    assert two[0].all_agree(later())
    assert two[1].all_agree(later())


def test_calls_are_compared_on_the_cpu_whatever_the_default_device(two: list[CallComparison]) -> None:
    with torch.device("meta"):
        for rank in two:
            rank.announce("sum")
        assert [rank.all_agree(later()) for rank in two] == [True, True]


def test_ranks_that_differ_get_one_error_and_go_on(two: list[CallComparison]) -> None:
    two[0].announce("sum of 3")
    two[1].announce("sum of 4")

    def told(rank: CallComparison) -> None:
        with pytest.raises(CollectiveMismatchError, match="rank 0: sum of 3; rank 1: sum of 4"):
            rank.all_agree(later())

    assert begin_threads({0: lambda: told(two[0]), 1: lambda: told(two[1])})() == {0: None, 1: None}
    for rank in two:
        rank.announce("barrier")
    assert [rank.all_agree(later()) for rank in two] == [True, True]
    assert [rank.decide(go=True) for rank in two] == [True, True]


def test_the_first_answer_holds_for_all(two: list[CallComparison]) -> None:
    for rank in two:
        rank.announce("sum")
    assert two[1].decide(go=True)
    assert two[0].decide(go=False)  # too late to give up: the other one has launched it
    for rank in two:
        rank.announce("sum")
    assert not two[0].decide(go=False)
    assert not two[1].decide(go=True)


def test_a_rank_that_leaves_is_noticed(two: list[CallComparison]) -> None:
    two[0].announce("sum")
    two[1].close()
    with pytest.raises(RuntimeError, match=r"(?i)closed|reset"):
        two[0].all_agree(later())
