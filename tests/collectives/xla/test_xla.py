"""XLA communicators, on a fake or the real torch_xla."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from raydist.collectives.base import Communicator, Membership
from raydist.collectives.process_group import GlooBackend, wait_slice
from raydist.collectives.rendezvous import RendezvousStore, connect_store
from raydist.collectives.xla import communicator
from raydist.collectives.xla.chip import Chip
from raydist.collectives.xla.communicator import CallComparison, XlaBackend, XlaGroup
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


class Ranks:
    """The other ranks, as a `CallComparison` shows them."""

    def __init__(self, *, here: bool = True, gone: bool = False, decision: bool | None = None) -> None:
        self.here, self.gone, self.decision = here, gone, decision

    def announce(self, call: str) -> None: ...

    def all_agree(self, deadline: float) -> bool:
        if self.gone:
            raise RuntimeError("connection closed by peer")
        return self.here

    def decide(self, *, go: bool) -> bool:
        self.decision = go if self.decision is None else self.decision
        return self.decision


class NoChip:
    def __init__(self) -> None:
        self.did: list[str] = []
        self.free = threading.Event()
        self.free.set()

    def launch(self) -> None:
        self.did.append("launch")

    def wait(self) -> None:
        self.free.wait(10)
        self.did.append("wait")


def group_of(ranks: Ranks) -> tuple[XlaGroup, NoChip]:
    chip: Any = NoChip()
    calls: Any = ranks
    return XlaGroup(calls, chip), chip


def noted(into: list[str], name: str) -> Callable[[], torch.Tensor]:
    """A program that notes that it was launched."""

    def program() -> torch.Tensor:
        into.append(name)
        return torch.ones(1)

    return program


def test_what_was_noted_since_is_no_part_of_a_collective() -> None:
    group, chip = group_of(Ranks())
    works = [group.add(name, noted(chip.did, name)) for name in ("a", "b")]
    for work in works:
        group.settle()
        assert wait_slice(work, 1.0)
    assert [did for did in chip.did if did != "wait"] == ["launch", "launch", "a", "launch", "b"]


def test_who_gives_up_what_others_have_begun_does_it_for_them() -> None:
    for others, launched in ((True, True), (False, False), (None, False)):
        group, _ = group_of(ranks := Ranks(here=False, decision=others))
        began: list[str] = []
        work = group.add("sum", noted(began, "sum"))
        group.give_up()
        assert not began  # nothing was announced
        assert not wait_slice(work, 0.0)
        group.give_up()
        group.give_up()
        assert bool(began) is launched, others
        assert ranks.decision is launched, others


def test_a_rank_that_is_gone_is_an_error_unless_all_have_begun() -> None:
    group, _ = group_of(Ranks(gone=True, decision=True))
    assert wait_slice(group.add("sum", lambda: torch.ones(1)), 1.0)
    group, _ = group_of(Ranks(gone=True, decision=False))
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        wait_slice(group.add("sum", lambda: torch.ones(1)), 1.0)


def test_a_program_that_does_not_end_is_waited_for_no_longer_than_asked() -> None:
    group, chip = group_of(Ranks())
    chip.free.clear()
    work = group.add("sum", lambda: torch.ones(1))
    assert not group.stuck
    assert not wait_slice(work, 0.01)
    assert group.stuck
    chip.free.set()
    assert wait_slice(work, 5.0)
    assert not group.stuck


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
