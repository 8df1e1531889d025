from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raydist.collectives.base import Communicator, Membership
from raydist.collectives.shared_memory import bays
from raydist.collectives.shared_memory.bays import CombiningTree
from raydist.collectives.shared_memory.board import Count
from raydist.collectives.shared_memory.calls import CallTexts
from raydist.collectives.shared_memory.generation import SharedGeneration
from raydist.collectives.shared_memory.layout import Layout
from raydist.collectives.shared_memory.segment import Segment
from raydist.errors import CollectiveMismatchError, RaydistError
from raydist.values import ReduceOp
from tests.collectives.shared_memory.ranks import run_sharing

MANY = 11  # from nine on a group has bays


def values(rank: int, numel: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.arange(numel).remainder(7).add(rank + 1).to(dtype)


@pytest.mark.parametrize("op", list(ReduceOp))
@pytest.mark.parametrize("numel", [1, 300, 5000, 16_384])  # the first through slots
def test_reduces(numel: int, op: ReduceOp) -> None:
    def body(communicator: Communicator) -> torch.Tensor:
        tensor = values(communicator.rank, numel)
        communicator.all_reduce(tensor, op).wait()
        return tensor

    rows = torch.stack([values(rank, numel) for rank in range(MANY)])
    expected = {
        ReduceOp.SUM: rows.sum(0),
        ReduceOp.MEAN: rows.mean(0),
        ReduceOp.MIN: rows.amin(0),
        ReduceOp.MAX: rows.amax(0),
        ReduceOp.PRODUCT: rows.prod(0),
    }
    results = run_sharing(MANY, body)
    torch.testing.assert_close(results[0], expected[op])
    assert all(torch.equal(result, results[0]) for result in results)


def test_root_alone_gets_the_reduction() -> None:
    def body(communicator: Communicator) -> torch.Tensor:
        tensor = values(communicator.rank, 9000, torch.int32)
        communicator.reduce(tensor, 3, ReduceOp.SUM).wait()
        return tensor

    result = run_sharing(MANY, body)[3]
    rows = torch.stack([values(rank, 9000, torch.int32) for rank in range(MANY)])
    assert torch.equal(result, rows.sum(0, dtype=torch.int32))


def test_several_are_under_way_between_others() -> None:
    """More than there are bays, of different lengths, between collectives that use none."""

    def body(communicator: Communicator) -> list[float]:
        sizes = [5000, 3, 16_000, 600, 100_000, 9000, 12_000, 8, 700, 16_000]
        tensors = [torch.full((size,), float(communicator.rank + place)) for place, size in enumerate(sizes)]
        works = [communicator.all_reduce(tensor, ReduceOp.SUM) for tensor in tensors]
        for work in reversed(works):
            work.wait()
        assert all(bool((tensor == tensor[0]).all()) for tensor in tensors)
        return [float(tensor[0]) for tensor in tensors]

    total = sum(range(MANY))
    assert run_sharing(MANY, body) == [[float(total + MANY * place) for place in range(10)]] * MANY


def test_bays_are_used_again_and_again() -> None:
    def body(communicator: Communicator) -> list[float]:
        sums = []
        for step in range(20):
            tensor = torch.full((4000,), float(step))
            communicator.all_reduce(tensor, ReduceOp.SUM).wait()
            sums.append(float(tensor[step]))
        return sums

    assert run_sharing(MANY, body) == [[float(MANY * step) for step in range(20)]] * MANY


def test_ranks_that_call_different_things_are_told() -> None:
    def body(communicator: Communicator) -> str:
        tensor = torch.ones(4000 if communicator.rank else 2)
        with pytest.raises(CollectiveMismatchError, match=r"torch.float32 \(2,\).*torch.float32 \(4000,\)"):
            communicator.all_reduce(tensor, ReduceOp.SUM).wait()
        return "told"

    assert run_sharing(MANY, body) == ["told"] * MANY


def test_ranks_of_which_one_brings_nothing_are_told() -> None:
    def body(communicator: Communicator) -> str:
        def call() -> None:
            if communicator.rank == 4:
                communicator.barrier()
            else:
                communicator.all_reduce(torch.ones(4000), ReduceOp.SUM).wait()

        with pytest.raises(CollectiveMismatchError, match=r"rank 4: barrier as call 0"):
            call()
        return "told"

    assert run_sharing(MANY, body) == ["told"] * MANY


def test_all_know_what_one_has_marked() -> None:
    def body(communicator: Communicator) -> tuple[bool, bool, float]:
        tensor = torch.ones(4000)
        if communicator.rank == 9:
            communicator.note()
        marked = communicator.all_reduce(tensor, ReduceOp.SUM)
        marked.wait()
        plain = communicator.all_reduce(tensor, ReduceOp.MEAN)
        plain.wait()
        return marked.noted, plain.noted, float(tensor[-1])

    assert run_sharing(MANY, body) == [(True, False, float(MANY))] * MANY


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN])
def test_halves_are_rounded_once(dtype: torch.dtype, op: ReduceOp) -> None:
    rows = torch.randn(MANY, 40_000, generator=torch.Generator().manual_seed(1)).to(dtype)

    def body(communicator: Communicator) -> torch.Tensor:
        tensor = rows[communicator.rank].clone()
        communicator.all_reduce(tensor, op).wait()
        return tensor

    wide = rows.double()
    expected = wide.sum(0) if op is ReduceOp.SUM else wide.mean(0)
    results = run_sharing(MANY, body)
    assert all(torch.equal(result, results[0]) for result in results)
    # Where float32 is just beside the middle of two halves it may fall to the other side: a few of 40,000.
    assert (results[0] != expected.to(dtype)).sum() < 40


def test_an_error_while_adding_up_reaches_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(rows: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        raise MemoryError("no room")

    monkeypatch.setattr(bays, "reduce_rows", fail)

    def body(communicator: Communicator) -> str:
        with pytest.raises((MemoryError, RaydistError), match="no room") as raised:
            communicator.all_reduce(torch.ones(4000), ReduceOp.SUM).wait()
        return raised.type.__name__

    assert set(run_sharing(MANY, body)) == {"MemoryError", "UnavailableError"}


# --- in one thread: who comes when -----------------------------------------------------------------------------------

_LENGTH = 1000


class Room:
    """Ranks that bring what they have to bay 0, as call 0."""

    def __init__(self, world_size: int) -> None:
        self.segment = Segment.create(Layout.of(world_size).size)
        self.segment.unlink()
        self.tensors = list(torch.randn(world_size, _LENGTH, generator=torch.Generator().manual_seed(world_size)))
        places = [Membership("room", generation=0, rank=rank, world_size=world_size) for rank in range(world_size)]
        self.generations = [SharedGeneration(place, self.segment, 5.0) for place in places]
        self.meetings = [
            CombiningTree(generation, 0, tensor.clone(), ReduceOp.SUM)
            for generation, tensor in zip(self.generations, self.tensors, strict=True)
        ]
        self.call = CallTexts().text("all_reduce", self.tensors[0]).ljust(248)

    def enter(self, rank: int) -> None:
        """Bring the part, and have it seen."""
        board = self.generations[rank].board
        self.generations[rank].view(board.layout.bay(rank, 0), _LENGTH, torch.float32).copy_(self.tensors[rank])
        board.write_call(0, self.call, 0)
        board.reach(Count.ENTERED, 1, waking=0)

    def come(self, rank: int) -> None:
        """Add up what is left to this rank."""
        self.meetings[rank].come(0, self.call)

    def totals(self) -> list[torch.Tensor]:
        for meeting in self.meetings:
            assert meeting.met()
            assert meeting.missing() == ()
            assert meeting.agreed
            meeting.copy_total()
        return [meeting._flat for meeting in self.meetings]


@pytest.fixture
def rooms() -> Iterator[list[Room]]:
    made: list[Room] = []
    yield made
    for room in made:
        room.segment.close()


def came_in(order: Sequence[int]) -> list[torch.Tensor]:
    room = Room(len(order))
    for rank in order:
        room.enter(rank)
        room.come(rank)
    totals = room.totals()
    room.segment.close()
    return totals


@given(order=st.integers(5, 20).flatmap(lambda size: st.permutations(range(size))))
def test_whoever_comes_last_the_bits_are_the_same(order: list[int]) -> None:
    totals, in_rank_order = came_in(order), came_in(range(len(order)))
    assert all(torch.equal(total, in_rank_order[0]) for total in totals)


@pytest.mark.parametrize("world_size", [5, 8, 9, 20])
def test_those_who_come_at_the_same_time_all_add_up_and_it_changes_nothing(rooms: list[Room], world_size: int) -> None:
    room = Room(world_size)
    rooms.append(room)
    for rank in range(world_size):
        room.enter(rank)
    for rank in range(world_size):
        room.come(rank)
    expected = came_in(range(world_size))[0]
    assert all(torch.equal(total, expected) for total in room.totals())


def test_missing_are_those_who_have_not_come_and_then_those_who_may_be_adding_up(rooms: list[Room]) -> None:
    room = Room(12)
    rooms.append(room)
    for rank in range(10):
        room.enter(rank)
        room.come(rank)
    first = room.meetings[0]
    assert (first.met(), first.missing()) == (False, (10, 11))
    room.enter(10)
    room.enter(11)
    assert (first.met(), first.missing()) == (False, (10, 11))
    room.come(10)
    assert (first.met(), first.missing(), first.agreed) == (True, (), True)
