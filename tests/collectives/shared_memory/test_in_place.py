from __future__ import annotations

import gc

import pytest
import torch

from raydist.collectives.shared_memory.board import Board
from raydist.collectives.shared_memory.in_place import (
    SharedTensors,
    allocation_bytes,
    offer_segment,
    open_offered,
    reduce_in_place,
)
from raydist.collectives.shared_memory.layout import Layout
from raydist.collectives.shared_memory.segment import Segment
from raydist.values import ReduceOp

SIZES = [(5, torch.float32), (0, torch.int64), (70_004, torch.float64)]


def make(world_size: int) -> tuple[list[SharedTensors], list[list[torch.Tensor]]]:
    segment = Segment.create(allocation_bytes(SIZES, world_size))
    segment.unlink()
    segment.close()
    registers = [SharedTensors() for _ in range(world_size)]
    return registers, [register.add(segment, SIZES, rank, world_size) for rank, register in enumerate(registers)]


def test_every_rank_has_tensors_of_its_own_and_sees_those_of_others() -> None:
    registers, tensors = make(3)
    for rank, of_rank in enumerate(tensors):
        assert [(t.numel(), t.dtype) for t in of_rank] == SIZES
        assert all(t.data_ptr() % 64 == 0 for t in of_rank)
        for tensor in of_rank:
            tensor.fill_(rank)
    found = registers[1].find(tensors[1][2])
    assert found is not None
    assert found.number == 3
    assert [copy.unique().tolist() for copy in found.copies] == [[0.0], [1.0], [2.0]]


def test_only_a_whole_tensor_is_found() -> None:
    registers, tensors = make(2)
    large = tensors[0][2]
    whole = registers[0].find(large.view(4, -1))
    assert whole is not None
    assert whole.number == 3
    for other in (large[1:], large[:5], large.view(torch.int64), torch.ones(5), tensors[0][1]):
        assert registers[0].find(other) is None


def test_tensors_that_are_dropped_are_forgotten() -> None:
    registers, tensors = make(2)
    place = tensors[0][2].data_ptr()
    part = tensors[0][2].detach()[:10].fill_(3.0)  # a view of it would keep it
    tensors.clear()
    gc.collect()
    assert registers[0].find(part) is None
    assert registers[0]._known == {}
    assert (part.data_ptr(), part.unique().tolist()) == (place, [3.0])


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("op", list(ReduceOp))
def test_ranks_reduce_their_slices(world_size: int, op: ReduceOp) -> None:
    layout = Layout.of(world_size)
    segment = Segment.create(layout.size)
    segment.unlink()
    registers, tensors = make(world_size)
    generator = torch.Generator().manual_seed(1)
    for of_rank in tensors:
        of_rank[2].uniform_(0.5, 1.5, generator=generator)
    stacked = torch.stack([of_rank[2] for of_rank in tensors])
    steps = []
    for rank, register in enumerate(registers):
        found = register.find(tensors[rank][2])
        assert found is not None
        steps.append(reduce_in_place(Board(segment, layout, rank), found.number, found, op))
    conditions = [next(step) for step in steps]
    assert all(condition.met() and condition.last for condition in conditions)
    expected = {
        ReduceOp.SUM: stacked.sum(0),
        ReduceOp.MEAN: stacked.mean(0),
        ReduceOp.MIN: stacked.amin(0),
        ReduceOp.MAX: stacked.amax(0),
        ReduceOp.PRODUCT: stacked.prod(0),
    }[op]
    for of_rank in tensors:
        torch.testing.assert_close(of_rank[2], expected)
    segment.close()


def test_what_a_rank_reduces_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks: the last adds up in memory of its own, block by block, and again in the same."""
    layout = Layout.of(3)
    segment = Segment.create(layout.size)
    segment.unlink()
    registers, tensors = make(3)
    monkeypatch.delattr("raydist.collectives.shared_memory.in_place.cut")
    for number in range(2):
        for of_rank in tensors:
            of_rank[2].fill_(number + 1.0)
        for rank, register in enumerate(registers):
            found = register.find(tensors[rank][2])
            assert found is not None
            next(reduce_in_place(Board(segment, layout, rank), number, found, ReduceOp.SUM))
        assert [of_rank[2].unique().tolist() for of_rank in tensors] == [[3.0 * (number + 1)]] * 3
    segment.close()


@pytest.mark.parametrize("size", [4096, (8 << 20) + 4096])
def test_what_is_offered_can_be_opened_and_large_tensors_lie_in_large_pages(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    joined: list[Segment] = []
    monkeypatch.setattr(Segment, "join_pages", lambda segment: joined.append(segment))
    offer = torch.zeros(256, dtype=torch.uint8)
    offered = offer_segment(size, offer)
    assert offered is not None
    opened = open_offered(size, offer)
    assert opened is not None
    offered.unlink()
    assert joined == ([offered] if size > 8 << 20 else [])
    offered.view(size - 8, 1, torch.int64).fill_(7)
    assert opened.view(size - 8, 1, torch.int64).item() == 7
    offered.close()
    opened.close()
