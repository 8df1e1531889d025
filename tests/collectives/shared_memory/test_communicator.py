"""Collectives in shared memory, and errors of ranks that call different collectives."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.collectives.base import Communicator, Work
from raydist.collectives.shared_memory.communicator import SharedMemoryBackend
from raydist.core.errors import CollectiveMismatchError, FailedPreconditionError
from raydist.core.values import ReduceOp
from tests.collectives.threads import run_ranks, run_sharing, team_on
from tests.contracts import communicator as contract

pytestmark = pytest.mark.timeout(180)

LARGE = 300_000
"""Elements of a tensor that does not pass at once."""


SIZES = (0, 1, 7, 4096, 4097, LARGE)
KINDS = ("all_reduce", "allocated", "all_gather", "broadcast", "barrier")
STEPS = st.tuples(st.sampled_from(KINDS), st.sampled_from(SIZES), st.sampled_from(list(ReduceOp)), st.booleans())


def play(group: Communicator, program: list[tuple[str, int, ReduceOp, bool]], dtype: torch.dtype) -> list[Any]:
    """Do the steps; those that are not waited for at once are waited for at the end, backwards."""
    works: list[Work] = []
    results = []
    for number, (kind, numel, op, at_once) in enumerate(program):
        generator = torch.Generator().manual_seed(100 * number + group.rank)
        outputs = [torch.randn(numel, generator=generator).to(dtype)]
        if kind == "all_reduce":
            works.append(group.all_reduce(outputs[0], op))
        elif kind == "allocated":
            (memory,) = group.allocate([(numel, dtype)])
            outputs = [memory.copy_(outputs[0])]
            works.append(group.all_reduce(memory, op))
        elif kind == "all_gather":
            own, outputs = outputs[0], [torch.zeros_like(outputs[0]) for _ in range(group.world_size)]
            works.append(group.all_gather(outputs, own))
        elif kind == "broadcast":
            works.append(group.broadcast(outputs[0], number % group.world_size))
        else:
            group.barrier()
        results.append(outputs)
        if at_once and works:
            works[-1].wait()
    for work in reversed(works):
        work.wait()
    group.barrier()
    return [[output.clone() for output in outputs] for outputs in results]


@settings(max_examples=25)
@given(
    world_size=st.sampled_from([1, 2, 2, 3, 5]),
    program=st.lists(STEPS, max_size=12),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
)
def test_any_sequence_gives_what_the_plain_group_gives(
    world_size: int, program: list[tuple[str, int, ReduceOp, bool]], dtype: torch.dtype
) -> None:
    expected = run_ranks(world_size, lambda group: play(group, program, dtype))
    got = run_sharing(world_size, lambda group: play(group, program, dtype))
    # The same bits: both reduce in the order of ranks.
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def reduce_one(communicator: Communicator) -> float:
    tensor = torch.ones(1)
    communicator.all_reduce(tensor, ReduceOp.SUM).wait()
    return tensor.item()


def test_a_shared_tensor_here_and_a_private_one_there() -> None:
    def body(communicator: Communicator) -> list[float]:
        (shared,) = communicator.allocate([(LARGE, torch.float32)])
        tensor = shared if communicator.rank == 0 else torch.empty(LARGE)
        tensor.fill_(communicator.rank + 1.0)
        communicator.all_reduce(tensor, ReduceOp.SUM).wait()
        return [tensor.amin().item(), tensor.amax().item()]

    assert run_sharing(2, body) == [[3.0, 3.0], [3.0, 3.0]]


def test_memory_that_cannot_be_shared_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(communicator: Communicator) -> object:
        if communicator.rank == 0:
            monkeypatch.setattr(os, "posix_fallocate", refuse)
        return contract.sums_of_allocated(communicator)

    def refuse(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    first, second = run_sharing(2, body)
    assert first == second == run_ranks(2, contract.sums_of_allocated)[0]


def test_a_group_of_two_generations_and_after_its_end() -> None:
    with team_on(SharedMemoryBackend(), 2) as team:
        team.run(reduce_one)
        team.reform()
        assert team.run(reduce_one) == [2.0, 2.0]
        groups = list(team._groups.values())
        for group in groups:
            group.close()
            group.close()
        with pytest.raises(FailedPreconditionError, match="the group is closed"):
            groups[0].all_reduce(torch.ones(1), ReduceOp.SUM)


MISMATCHES: dict[str, Callable[[Communicator, int], Any]] = {
    "large and small": lambda c, rank: c.broadcast(torch.ones(LARGE if rank else 1), 0),
    "memory": lambda c, rank: c.allocate([(LARGE + rank, torch.float32)]),
    "long shapes": lambda c, rank: c.all_reduce(torch.ones((1,) * 63 + (1 + rank,)), ReduceOp.SUM),
}


def test_a_mismatch_is_an_error_on_every_rank_and_the_group_goes_on() -> None:
    def body(communicator: Communicator) -> list[tuple[str, float]]:
        assert communicator.checks_itself
        told = []
        for call in MISMATCHES.values():
            with pytest.raises(CollectiveMismatchError) as caught:
                call(communicator, communicator.rank).wait()
            told.append((str(caught.value), reduce_one(communicator)))
        return told

    for name, (first, second), (other, _) in zip(MISMATCHES, *run_sharing(2, body), strict=True):
        assert second == 2.0, name
        assert first == other, name
        assert "rank 0: " in first, name
        assert "rank 1: " in first, name
