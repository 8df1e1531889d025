"""Staged reductions: what they keep between calls, whom they wait for; results are tested with those in place, too."""

from __future__ import annotations

import random
import time
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from raydist.collectives.base import Communicator
from raydist.collectives.hierarchical import staged, windows
from raydist.values import ReduceOp
from tests.collectives.hierarchical.ranks import run_hosted

BLOCK = 64 << 10


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of which tensors have several that are quick to add up."""
    monkeypatch.setattr(windows, "_MOST_BLOCK", BLOCK)
    monkeypatch.setattr(windows, "_LARGE_BLOCK", BLOCK)


@pytest.mark.parametrize("hosts", ["aabb", "aab"])
def test_other_tensors_of_a_kind_are_reduced_with_what_is_known(hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    new_stage = staged.StagedReductions._new_stage  # not what is exchanged: a host of one rank has that made anew

    def counted(self: staged.StagedReductions, *args: Any) -> Any:
        made.append(1)
        return new_stage(self, *args)

    monkeypatch.setattr(staged.StagedReductions, "_new_stage", counted)

    def num_made(communicator: Communicator) -> list[tuple[int, bool]]:
        found = []
        for turn in range(4):
            tensor = torch.full((8 * 2 * BLOCK // 4,), float(turn + communicator.rank))
            communicator.all_reduce(tensor, ReduceOp.SUM).wait()
            communicator.barrier()
            total = sum(turn + rank for rank in range(communicator.world_size))
            found.append((len(made), bool((tensor == total).all())))
            communicator.barrier()  # nobody begins the next one while others count
        return found

    for first, *later in run_hosted(hosts, num_made):
        assert first[0] > 0
        assert later == [(first[0], True)] * 3


@pytest.mark.parametrize("kept", [3, 64])
def test_kinds_of_tensors_take_turns(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by several operations, some with a rest shorter than a block; more of them than are kept, or fewer."""
    monkeypatch.setattr(staged, "_MOST_KNOWN", kept)

    def sums(communicator: Communicator) -> bool:
        rank, size = communicator.rank, communicator.world_size
        right = []
        for turn, numel in enumerate((300_000, 70_001, 150_000, 33_333, 300_000, 70_001) * 2):
            dtype = (torch.float32, torch.float64, torch.int64)[turn % 3]
            values = [other + turn for other in range(size)]
            for op, expected in ((ReduceOp.SUM, sum(values)), (ReduceOp.MAX, max(values))):
                tensor = torch.full((numel,), rank + turn, dtype=dtype)
                communicator.all_reduce(tensor, op).wait()
                right.append(bool((tensor == expected).all()))
        return all(right)

    assert run_hosted("aabb", sums) == [True] * 4


@pytest.mark.parametrize("hosts", ["aabb", "abaa", "aabbbcc"])
def test_ranks_that_are_late_anywhere_get_the_same(hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a rank does with a window, it does it a while after the others, now and then."""
    late = random.Random(7)
    for name in ("load", "begin", "take_own", "take_others"):
        monkeypatch.setattr(staged._Stage, name, _sometimes_late(getattr(staged._Stage, name), late))
    numel = 13 * 2 * BLOCK // 4 + 77  # so many windows of two lanes, and a rest
    brought = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(len(hosts))]
    expected = torch.stack(brought).to(torch.float64).mean(0)

    def error(communicator: Communicator) -> float:
        worst = 0.0
        for _ in range(3):
            tensor = brought[communicator.rank].clone()
            communicator.all_reduce(tensor, ReduceOp.MEAN).wait()
            worst = max(worst, float((tensor - expected).abs().max()))
        return worst

    assert max(run_hosted(hosts, error)) < 1e-5


def _sometimes_late(method: Any, late: random.Random) -> Any:
    def wrapped(self: staged._Stage, window: torch.Tensor) -> None:
        if late.random() < 0.1:
            time.sleep(0.003)
        method(self, window)

    return wrapped


def test_the_tensor_is_not_kept() -> None:
    def is_gone(communicator: Communicator) -> bool:
        memory = np.ones(345_679)
        kept = weakref.ref(memory)
        communicator.all_reduce(torch.from_numpy(memory), ReduceOp.SUM).wait()
        del memory
        return kept() is None

    assert run_hosted("aabb", is_gone) == [True] * 4
