"""Collectives in shared memory, and errors of ranks that call different collectives."""

from __future__ import annotations

import errno
import functools
import gc
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.collectives.base import Communicator, Declined, Work
from raydist.collectives.rendezvous import RendezvousStore
from raydist.collectives.shared_memory.communicator import SharedMemoryBackend, join
from raydist.collectives.shared_memory.control import why_unsupported
from raydist.core.errors import CollectiveMismatchError, DeadlineExceededError, FailedPreconditionError
from raydist.core.values import ReduceOp
from raydist.utils.shared_segment import Segment
from tests.collectives.processes import ProcessTeam
from tests.collectives.shared_memory.test_faults import Rounds
from tests.collectives.threads import begin_threads, run_ranks, run_sharing, team_on
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


# --- joining ----------------------------------------------------------------------------------------------------------

SIZE = 1 << 16


@pytest.fixture
def store() -> Iterator[RendezvousStore]:
    with RendezvousStore() as opened:
        yield opened


def meet(store: RendezvousStore, size: int, timeout_s: float) -> dict[int, Any]:
    members = [store.membership("g", generation=0, rank=rank, world_size=size) for rank in range(size)]
    return begin_threads({one.rank: functools.partial(join, one, 0, SIZE, timeout_s) for one in members})()


def test_ranks_that_cannot_open_the_segment(store: RendezvousStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(name: str, size: int, token: bytes) -> Segment:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(Segment, "open", staticmethod(elsewhere))
    reason = "no shared memory: No such file or directory"
    for outcome in meet(store, 3, 10.0).values():
        assert isinstance(outcome, Declined), outcome
        assert str(outcome) == f"every rank must map the segment, got rank 1: {reason}; rank 2: {reason}"


def test_a_member_that_fails_on_the_way(store: RendezvousStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Segment, "accept", fail)
    outcomes = meet(store, 2, timeout_s=0.5)
    assert isinstance(outcomes[1], KeyboardInterrupt)
    assert isinstance(outcomes[0], DeadlineExceededError)
    assert "rank 1 did not arrive" in str(outcomes[0])


def what_is_held() -> set[str]:
    """Return the segments of which this process has a descriptor or a mapping."""
    gc.collect()
    descriptors = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    mappings = Path("/proc/self/maps").read_text().split()
    return {name for name in (*descriptors, *mappings) if "raydist-shm" in name}


def number_held(communicator: Communicator) -> int:
    return len(what_is_held())


def test_a_new_generation_leaves_nothing_of_the_last(shm_team: ProcessTeam) -> None:
    shm_team.reform()
    shm_team.run(Rounds(0, by_s=0.0))
    first = shm_team.run(number_held)
    for _ in range(2):
        shm_team.reform()
        shm_team.run(Rounds(0, by_s=0.0))
    assert shm_team.run(number_held) == first


def test_machines_that_promise_less(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_unsupported() is None
    for system, machine in (("linux", "aarch64"), ("darwin", "x86_64")):
        monkeypatch.setattr(sys, "platform", system)
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        assert why_unsupported() == f"it needs Linux on x86-64, and this is {system} on {machine}"
