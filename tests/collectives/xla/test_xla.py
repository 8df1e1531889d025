"""XLA communicators, on a fake or the real torch_xla."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import HashStore

from raydist.collectives.base import Communicator, Membership
from raydist.collectives.process_group import GlooBackend, wait_slice
from raydist.collectives.reducer.reducer import GradientReducer
from raydist.collectives.rendezvous import RendezvousStore, connect_store
from raydist.collectives.xla import communicator
from raydist.collectives.xla.chip import Chip
from raydist.collectives.xla.communicator import CallComparison, XlaBackend, XlaGroup
from raydist.core.errors import CollectiveMismatchError, FailedPreconditionError, UnavailableError
from raydist.core.values import ReduceOp
from tests.collectives.threads import begin_threads
from tests.xla_world import IS_REAL, XlaTeam, chips_here

# --- backend ----------------------------------------------------------------------------------------------------------


def test_a_chip_that_is_stuck_joins_no_other_group(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck:
        stuck = True

    backend = XlaBackend()
    group: Any = Stuck()
    monkeypatch.setitem(communicator._LATEST, ("g", 1), group)
    with pytest.raises(UnavailableError, match="chip of rank 1 is still in a collective that another chip has left"):
        backend.create(HashStore(), Membership("g", 1, 1, 2), 1.0)


@pytest.mark.skipif(IS_REAL, reason="a process has its chips for its life")
def test_replicas_that_are_not_one_a_chip(chips: None) -> None:
    with RendezvousStore() as store:
        member = store.membership("g", generation=0, rank=0, world_size=1)
        with pytest.raises(FailedPreconditionError, match=r"Each of the 1 replicas .* sees 3 chips .* numbers 2\."):
            XlaBackend().open(member, torch.device("xla:0"), 10.0)


# --- chip -------------------------------------------------------------------------------------------------------------


def test_a_host_without_torch_xla_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    with pytest.raises(FailedPreconditionError, match=r"need torch_xla, but host .* says: .*pip install 'torch~="):
        Chip(0).open()


@pytest.mark.skipif(IS_REAL, reason="a process has its chips for its life")
def test_a_chip_that_the_host_does_not_have(chips: None) -> None:
    with pytest.raises(UnavailableError, match=r"must work on chip 3 of host .*, but it has 3\. Check that"):
        Chip(3).open()


@pytest.mark.skipif(IS_REAL, reason="a process has its chips for its life")
def test_a_chip_alone() -> None:
    import torch

    with chips_here(1):
        chip = Chip(0).open()
        assert (chip.ordinal, chip.num_chips) == (0, 1)
        mine = torch.arange(3.0, device=chip.device)
        chip.launch()
        total, everyones = chip.all_reduce(mine, ReduceOp.SUM), chip.all_gather(mine)
        chip.wait()
        assert total.tolist() == [0.0, 1.0, 2.0]
        assert everyones.tolist() == [[0.0, 1.0, 2.0]]


def test_without_a_word_about_the_device_it_is_a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if IS_REAL:
        pytest.skip("a process has one kind of device for its life")
    import os

    with chips_here(1):
        monkeypatch.delenv("PJRT_DEVICE", raising=False)
        Chip(0).open()
        assert os.environ["PJRT_DEVICE"] == "TPU"  # else torch_xla takes the CPU where it sees no TPU
        monkeypatch.setenv("PJRT_DEVICE", "CPU")
        Chip(0).open()
        assert os.environ["PJRT_DEVICE"] == "CPU"


# --- pending collectives ----------------------------------------------------------------------------------------------


class Ranks:
    """The other ranks, as a `CallComparison` shows them."""

    def __init__(self, *, here: bool = True, gone: bool = False, decision: bool | None = None) -> None:
        self.here, self.gone, self.decision = here, gone, decision
        self.said: list[str] = []

    def announce(self, call: str) -> None:
        self.said.append(call)

    def all_agree(self, deadline: float) -> bool:
        if self.gone:
            raise RuntimeError("connection closed by peer")
        if self.said[-1] == "odd":
            raise CollectiveMismatchError("All replicas must call the same, got odd.")
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


def test_a_mismatch_is_for_who_waits_and_the_rest_goes_on() -> None:
    group, _ = group_of(Ranks())
    odd, after = group.add("odd", None), group.add("even", None)
    assert wait_slice(after, 1.0)
    with pytest.raises(CollectiveMismatchError, match="got odd"):
        wait_slice(odd, 1.0)


@pytest.mark.parametrize(("others", "launched"), [(True, True), (False, False), (None, False)])
def test_who_gives_up_what_others_have_begun_does_it_for_them(others: bool | None, *, launched: bool) -> None:
    group, _ = group_of(ranks := Ranks(here=False, decision=others))
    began: list[str] = []
    work = group.add("sum", noted(began, "sum"))
    group.give_up()
    assert not began  # nothing was announced
    assert not wait_slice(work, 0.0)
    group.give_up()
    group.give_up()
    assert bool(began) is launched
    assert ranks.decision is launched


@pytest.mark.parametrize("others", [True, False])
def test_a_rank_that_is_gone_is_an_error_unless_all_have_begun(*, others: bool) -> None:
    group, _ = group_of(Ranks(gone=True, decision=others))
    work = group.add("sum", lambda: torch.ones(1))
    if others:
        assert wait_slice(work, 1.0)
    else:
        with pytest.raises(RuntimeError, match="connection closed by peer"):
            wait_slice(work, 1.0)


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


# --- groups of chips --------------------------------------------------------------------------------------------------

WORLD = 3


@pytest.fixture
def team(chips: None) -> Iterator[XlaTeam]:
    team = XlaTeam(WORLD, timeout_s=5.0)
    yield team
    team.close()


def keep_signs(communicator: Communicator) -> list[float]:
    """A broadcast moves bits, though it is a sum."""
    mine = torch.tensor([-0.0, float("nan"), 1e-40]) if communicator.rank == 1 else torch.full((3,), 7.0)
    communicator.broadcast(mine, 1).wait()
    return [torch.copysign(torch.ones(1), mine[:1].cpu()).item(), float(mine[1].isnan()), mine[0].item()]


def wait_for_some(communicator: Communicator) -> list[float]:
    """Ranks wait in different orders, and for some not at all; they start the same."""
    tensors = [torch.full((2,), float(k)) for k in range(3)]
    works = [communicator.all_reduce(tensor, ReduceOp.SUM) for tensor in tensors]
    works[2 if communicator.rank else 0].wait()
    if not communicator.rank:
        works[2].wait()
    communicator.barrier()
    works[1].wait()
    return [tensors[1][0].item(), tensors[2][0].item()]


def made() -> tuple[torch.nn.Linear, torch.Tensor]:
    """A model and six rows, without random numbers: threads share their generator."""
    model = torch.nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 8).reshape(2, 4))
        model.bias.fill_(0.5)
    return model, torch.linspace(-2, 3, 24).sin().reshape(6, 4)


def train(communicator: Communicator) -> list[list[float]]:
    """Two steps of a model on rows that are not the same number on every chip."""
    with torch.device("cpu"):
        model, rows = made()
    model = model.to(communicator.device)
    first, last = ((0, 3), (3, 5), (5, 6))[communicator.rank]
    mine = rows[first:last].to(communicator.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reducer = GradientReducer(communicator)
    reducer.attach(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        with reducer.step(weight=len(mine) / 6):
            model(mine).square().mean().backward()
        optimizer.step()
    reducer.close()
    return [parameter.detach().cpu().tolist() for parameter in model.parameters()]


def trained_alone() -> list[list[float]]:
    model, rows = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
    return [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.timeout(120)
def test_gradients_of_chips_are_global_after_backward(team: XlaTeam) -> None:
    for weight, bias in team.run(train):
        expected = trained_alone()
        np.testing.assert_allclose(weight, expected[0], atol=1e-6)
        np.testing.assert_allclose(bias, expected[1], atol=1e-6)


@pytest.mark.timeout(120)
def test_groups_of_chips(team: XlaTeam) -> None:
    assert team.run(keep_signs) == [[-1.0, 1.0, 0.0]] * WORLD
    assert team.run(wait_for_some) == [[1.0 * WORLD, 2.0 * WORLD]] * WORLD


# --- call comparison --------------------------------------------------------------------------------------------------


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
