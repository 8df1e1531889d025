"""Each rank's part by itself, in whatever order ranks come to it; whole groups are in `test_communicator.py`."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raydist.collectives.shared_memory.board import Board
from raydist.collectives.shared_memory.large_tensors import gather_large, reduce_large, scatter_large, swap_large
from raydist.collectives.shared_memory.layout import Layout
from raydist.collectives.shared_memory.segment import Segment
from raydist.collectives.shared_memory.staging import Staging
from raydist.collectives.shared_memory.task import Steps, Task
from raydist.collectives.wire import stage_bytes, stage_reduction
from raydist.values import ReduceOp

NUMEL = 700_001
"""More than one window takes."""


def play(world_size: int, part: Callable[[Any, int], Steps]) -> None:
    """Let all ranks do their parts, in a random order, as far as each can."""
    layout = Layout.of(world_size)
    segment = Segment.create(layout.size)
    segment.unlink()
    boards = [Board(segment, layout, rank) for rank in range(world_size)]
    groups = [SimpleNamespace(board=board, staging=Staging(segment, board)) for board in boards]
    waiting = [Task("work", part(group, rank)) for rank, group in enumerate(groups)]
    rng = random.Random(world_size)
    for _ in range(100_000):
        if not waiting:
            break
        task = rng.choice(waiting)
        task.advance()
        waiting = [each for each in waiting if not each.done]
    segment.close()
    assert not waiting, "the ranks wait for each other"


def numbers(rank: int) -> torch.Tensor:
    return torch.arange(NUMEL, dtype=torch.float64) * (rank + 1)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MAX])
def test_all_reduce_what_each_has(world_size: int, op: ReduceOp) -> None:
    mine = [numbers(rank) for rank in range(world_size)]
    expected = torch.stack(mine).sum(0) if op is ReduceOp.SUM else mine[-1].clone()

    def part(group: Any, rank: int) -> Steps:
        staged = stage_reduction(mine[rank], op, 1)
        return reduce_large(group, 0, staged, staged.values, op, everywhere=True, memory=None)

    play(world_size, part)
    for tensor in mine:
        torch.testing.assert_close(tensor, expected)


def test_each_gets_the_sum_of_its_parts() -> None:
    given = [[numbers(rank) + other for other in range(3)] for rank in range(3)]
    outputs = [torch.zeros(NUMEL, dtype=torch.float64) for _ in range(3)]

    def part(group: Any, rank: int) -> Steps:
        staged = stage_reduction(outputs[rank], ReduceOp.SUM, 1)
        return scatter_large(group, staged, given[rank], staged.values, ReduceOp.SUM)

    play(3, part)
    for rank, output in enumerate(outputs):
        torch.testing.assert_close(output, torch.stack([of_rank[rank] for of_rank in given]).sum(0))


def test_each_gives_each_a_part() -> None:
    given = [[numbers(rank) + 10 * other for other in range(2)] for rank in range(2)]
    outputs = [[torch.zeros(NUMEL, dtype=torch.float64) for _ in range(2)] for _ in range(2)]

    def part(group: Any, rank: int) -> Steps:
        parts = [stage_bytes(tensor).carrier for tensor in given[rank]]
        return swap_large(group, parts, [stage_bytes(output) for output in outputs[rank]])

    play(2, part)
    for rank, row in enumerate(outputs):
        assert all(torch.equal(output, given[other][rank]) for other, output in enumerate(row))


def test_those_who_want_it_read_what_one_shows() -> None:
    shown = numbers(4)
    outputs = {rank: torch.zeros_like(shown) for rank in (1, 2)}
    told: list[int] = []

    def part(group: Any, rank: int) -> Steps:
        source = stage_bytes(shown).carrier if rank == 0 else None
        targets = {0: stage_bytes(outputs[rank]).carrier} if rank else {}
        return gather_large(group, shown.nbytes, source, targets, lambda: told.append(rank))

    play(3, part)
    assert all(torch.equal(output, shown) for output in outputs.values())
    assert sorted(told) == [0, 1, 2]
