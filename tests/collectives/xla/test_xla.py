"""XLA communicators, on a fake or the real torch_xla."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from raydist.collectives.base import Communicator, Membership
from raydist.collectives.process_group import GlooBackend
from raydist.collectives.rendezvous import RendezvousStore, connect_store
from raydist.collectives.xla import communicator
from raydist.collectives.xla.chip import Chip
from raydist.collectives.xla.communicator import CallComparison, XlaBackend
from raydist.core.errors import FailedPreconditionError, UnavailableError
from raydist.core.values import ReduceOp
from tests.collectives.threads import begin_threads
from tests.xla_world import IS_REAL, XlaTeam, chips_here


def test_a_chip_that_is_stuck_joins_no_other_group(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck:
        stuck = True

    backend = XlaBackend()
    group: Any = Stuck()
    monkeypatch.setitem(communicator._LATEST, ("g", 1), group)
    with pytest.raises(UnavailableError, match="chip of rank 1 is still in a collective that another chip has left"):
        backend.create(HashStore(), Membership("g", 1, 1, 2), 1.0)


def test_a_host_without_torch_xla_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    with pytest.raises(FailedPreconditionError, match=r"need torch_xla, but host .* says: .*pip install 'torch~="):
        Chip(0).open()


@pytest.mark.skipif(IS_REAL, reason="a process has its chips for its life")
def test_a_chip_that_the_host_does_not_have_and_replicas_that_are_not_one_a_chip(chips: None) -> None:
    with pytest.raises(UnavailableError, match=r"must work on chip 3 of host .*, but it has 3\. Check that"):
        Chip(3).open()
    with RendezvousStore() as store:
        member = store.membership("g", generation=0, rank=0, world_size=1)
        with pytest.raises(FailedPreconditionError, match=r"Each of the 1 replicas .* sees 3 chips .* numbers 2\."):
            XlaBackend().open(member, torch.device("xla:0"), 10.0)


@pytest.mark.skipif(IS_REAL, reason="a process has its chips for its life")
def test_a_chip_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with chips_here(1):
        monkeypatch.delenv("PJRT_DEVICE", raising=False)
        chip = Chip(0).open()
        assert os.environ["PJRT_DEVICE"] == "TPU"  # else torch_xla takes the CPU where it sees no TPU
        assert (chip.ordinal, chip.num_chips) == (0, 1)
        mine = torch.arange(3.0, device=chip.device)
        chip.launch()
        total, everyones = chip.all_reduce(mine, ReduceOp.SUM), chip.all_gather(mine)
        chip.wait()
        assert total.tolist() == [0.0, 1.0, 2.0]
        assert everyones.tolist() == [[0.0, 1.0, 2.0]]
        monkeypatch.setenv("PJRT_DEVICE", "CPU")
        Chip(0).open()
        assert os.environ["PJRT_DEVICE"] == "CPU"


WORLD = 3


@pytest.fixture
def team(chips: None) -> Iterator[XlaTeam]:
    team = XlaTeam(WORLD, timeout_s=5.0)
    yield team
    team.close()


@pytest.mark.timeout(120)
def test_a_broadcast_moves_bits_though_it_is_a_sum(team: XlaTeam) -> None:
    def keep_signs(communicator: Communicator) -> list[float]:
        mine = torch.tensor([-0.0, float("nan"), 1e-40]) if communicator.rank == 1 else torch.full((3,), 7.0)
        communicator.broadcast(mine, 1).wait()
        return [torch.copysign(torch.ones(1), mine[:1].cpu()).item(), float(mine[1].isnan()), mine[0].item()]

    assert team.run(keep_signs) == [[-1.0, 1.0, 0.0]] * WORLD


def compared(membership: Membership) -> CallComparison:
    store = connect_store(membership, 10.0)
    return CallComparison(membership, store, GlooBackend().create(store, membership, 10.0))


def test_the_first_answer_of_a_call_comparison_holds_for_all() -> None:
    with RendezvousStore() as store:
        members = [store.membership("g", generation=0, rank=rank, world_size=2) for rank in (0, 1)]
        two: Any = begin_threads({one.rank: functools.partial(compared, one) for one in members})()
        for rank in two.values():
            rank.announce("sum")
        assert two[1].decide(go=True)
        assert two[0].decide(go=False)  # too late to give up: the other one has launched it
        for rank in two.values():
            rank.announce("sum")
        assert not two[0].decide(go=False)
        assert not two[1].decide(go=True)
        for rank in two.values():
            rank.close()
            rank.close()
