"""What becomes of collectives that are under way; that they do what they should is in the contract of communicators."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from raydist.collectives.process_group import wait_slice
from raydist.collectives.xla.communicator import XlaGroup
from raydist.errors import CollectiveMismatchError


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


def test_those_before_it_go_first() -> None:
    group, _ = group_of(ranks := Ranks())
    order: list[str] = []
    works = [group.add(name, noted(order, name)) for name in ("a", "b", "c")]
    assert wait_slice(works[1], 1.0)
    assert order == ["a", "b"]
    assert [work.is_completed() for work in works] == [True, True, False]
    assert ranks.said == ["a", "b"]


def test_what_was_noted_runs_before_the_first_collective_only() -> None:
    group, chip = group_of(Ranks())
    works = [group.add(name, None) for name in ("a", "b")]
    for work in works:
        group.settle()
        assert wait_slice(work, 1.0)
    assert chip.did == ["launch", "wait"]


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


def test_an_error_of_the_program_is_for_who_waits() -> None:
    def program() -> torch.Tensor:
        raise RuntimeError("out of memory")

    group, _ = group_of(Ranks())
    work = group.add("sum", program)
    with pytest.raises(RuntimeError, match="out of memory"):
        wait_slice(work, 1.0)
    assert work.is_completed()


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
