from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from raydist.collectives.shared_memory.board import Board
from raydist.collectives.shared_memory.layout import Layout
from raydist.collectives.shared_memory.segment import Segment
from raydist.collectives.shared_memory.staging import Gather, PairReduction, Reduction, Staging
from raydist.collectives.shared_memory.task import Steps, Task
from raydist.values import ReduceOp

NUMEL = 2_000_003
"""More than fits the staging memory."""


def play(world_size: int, rounds: Callable[[Staging], list[Steps]], seed: int) -> None:
    """Let the ranks take their steps in a random order, as far as each can."""
    layout = Layout.of(world_size)
    segment = Segment.create(layout.size)
    segment.unlink()
    tasks = []
    for rank in range(world_size):
        steps = rounds(Staging(segment, Board(segment, layout, rank)))
        tasks.append([Task("work", one) for one in steps])
    rng = random.Random(seed)
    for _ in range(100_000):
        waiting = [of_rank for of_rank in tasks if of_rank]
        if not waiting:
            break
        of_rank = rng.choice(waiting)
        of_rank[0].advance()
        if of_rank[0].done:
            of_rank.pop(0)
    segment.close()
    assert not any(tasks), "the ranks wait for each other"


def tensors(world_size: int) -> list[torch.Tensor]:
    return [torch.arange(NUMEL, dtype=torch.float64) * (rank + 1) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("seed", range(3))
def test_slices_are_reduced_whoever_is_faster(world_size: int, seed: int) -> None:
    mine = tensors(world_size)
    expected = torch.stack(mine).sum(0)

    def rounds(staging: Staging) -> list[Steps]:
        tensor = mine[staging.rank]
        windows = staging.sliced(NUMEL, 8)
        assert len(windows) > 2
        reduction = Reduction(staging, [tensor] * world_size, tensor, ReduceOp.SUM, everywhere=True)
        mean = Reduction(staging, [tensor] * world_size, tensor, ReduceOp.MEAN, everywhere=True)
        return [staging.transfer(windows, reduction), staging.transfer(windows, mean)]

    play(world_size, rounds, seed)
    for tensor in mine:
        torch.testing.assert_close(tensor, expected)


@pytest.mark.parametrize("seed", range(3))
def test_two_ranks_add_up_what_they_give_each_other(seed: int) -> None:
    mine = tensors(2)
    expected = mine[0] + mine[1]

    def rounds(staging: Staging) -> list[Steps]:
        tensor = mine[staging.rank]
        windows = staging.whole(NUMEL, 8, num_tensors=2)
        return [
            staging.exchange(windows, PairReduction(staging, tensor, ReduceOp.SUM)),
            staging.transfer(
                staging.sliced(NUMEL, 8), Reduction(staging, [tensor] * 2, tensor, ReduceOp.MEAN, everywhere=True)
            ),
            staging.exchange(windows, PairReduction(staging, tensor, ReduceOp.MEAN)),
        ]

    play(2, rounds, seed)
    assert torch.equal(mine[0], expected)
    assert torch.equal(mine[1], expected)


@pytest.mark.parametrize("seed", range(3))
def test_scattered_slices_and_gathered_tensors(seed: int) -> None:
    size = 3
    inputs = [[torch.full((NUMEL,), float(rank + 10 * place)) for place in range(size)] for rank in range(size)]
    outputs = [torch.zeros(NUMEL) for _ in range(size)]
    gathered = [[torch.zeros(NUMEL * 4, dtype=torch.uint8) for _ in range(size)] for _ in range(size)]
    told = [torch.full((NUMEL,), float(rank)).view(torch.uint8) for rank in range(size)]

    def rounds(staging: Staging) -> list[Steps]:
        rank = staging.rank
        scatter = Reduction(staging, inputs[rank], outputs[rank], ReduceOp.SUM, scattered=True)
        gather = Gather(staging, told[rank].clone(), dict(enumerate(gathered[rank])))
        tell = Gather(staging, told[rank] if rank == 1 else None, {} if rank == 1 else {1: told[rank]})
        return [
            staging.exchange(staging.whole(NUMEL, 4, num_tensors=size), scatter),
            staging.exchange(staging.whole(NUMEL * 4, 1, num_tensors=1), gather),
            staging.exchange(staging.whole(NUMEL * 4, 1, num_tensors=1), tell),
        ]

    play(size, rounds, seed)
    for rank in range(size):
        assert outputs[rank].unique().tolist() == [sum(range(size)) + 10.0 * rank * size]
        assert [part.view(torch.float32).unique().tolist() for part in gathered[rank]] == [[0.0], [1.0], [2.0]]
        assert told[rank].view(torch.float32).unique().tolist() == [1.0]


def test_pages_are_joined_once_by_one_rank_for_the_first_large_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[Segment] = []
    monkeypatch.setattr(Segment, "join_pages", lambda segment: joined.append(segment))
    layout = Layout.of(2)
    segment = Segment.create(layout.size)
    segment.unlink()
    first, second = (Staging(segment, Board(segment, layout, rank)) for rank in range(2))
    for staging in (second, first):
        assert [staging.claim(3), staging.claim(2)] == [0, 3]
    assert joined == []
    assert [second.claim(4), first.claim(4), first.claim(40)] == [5, 5, 9]
    assert joined == [segment]
    segment.close()
